"""The model's config: one template, and the committed file is what it gives."""

from pathlib import Path

import pytest
from google.protobuf import text_format
from trieton_builder.bundle.model_config import render_config, render_ensemble_config
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

ROOT = Path(__file__).parents[1]


def parsed(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def test_the_committed_config_equals_the_default_of_the_template():
    assert (ROOT / "model_repository/generative_retriever/config.pbtxt").read_text() == render_config()


@pytest.mark.parametrize("text_ids", [False, True])
def test_id_tensors_have_the_type_of_the_catalogue_and_every_input_is_optional_and_ragged(text_ids):
    config = parsed(render_config(text_ids=text_ids))
    id_type = DataType.TYPE_STRING if text_ids else DataType.TYPE_INT64
    types = {entry.name: entry.data_type for entry in config.input}
    assert types == {
        "history": id_type,
        "input_ids": DataType.TYPE_INT32,
        "include_items": id_type,
        "exclude_items": id_type,
    }
    assert all(entry.optional and entry.allow_ragged_batch for entry in config.input)
    assert {e.name: e.data_type for e in config.output}["item_ids"] == id_type
    assert not config.response_cache.enable


@pytest.mark.parametrize("text_ids", [False, True])
def test_the_ensemble_maps_only_what_the_retriever_has(text_ids):
    inner = parsed(render_config(text_ids=text_ids, max_batch_size=8))
    outer = parsed(render_ensemble_config(text_ids=text_ids, max_batch_size=8))
    (step,) = outer.ensemble_scheduling.step
    assert step.model_name == inner.name
    assert outer.max_batch_size == inner.max_batch_size
    for entries, inner_entries, mapped in (
        (outer.input, inner.input, step.input_map),
        (outer.output, inner.output, step.output_map),
    ):
        theirs = {entry.name: entry.data_type for entry in inner_entries}
        for entry in entries:
            assert theirs[mapped[entry.name]] == entry.data_type


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_batch_size": 0}, "max_batch_size: expected a positive number, got 0"),
        ({"default_beam_width": 300}, "default_beam_width: expected at most max_beam_width = 256, got 300"),
        ({"max_num_results": 1000}, "max_num_results: expected at most max_beam_width = 256, got 1000"),
        ({"device": "tpu"}, "device: expected 'cpu' or 'gpu', got 'tpu'"),
        ({"kernel": "fast"}, "kernel: expected"),
        ({"threads": -1}, "threads: expected 0 or a positive number, got -1"),
        ({"decode_bytes": -1}, "decode_bytes: expected 0 or a positive number, got -1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        render_config(**options)
