"""A retriever that is two models of the server: the same answers as the one in the model's own process."""

import json
import shutil

import pytest
from tiny_bundle import SIZES, tiny_catalogue
from trieton.bundle import Bundle
from trieton.search.searcher import Query, Searcher
from trieton_builder.bundle.bls import write_bls_retriever, write_graph_models
from trieton_builder.bundle.model_config import render_config
from trieton_builder.bundle.write import write_bundle
from trieton_builder.cli import app
from trieton_builder.rollout import RolloutError, publish, rollback
from trieton_builder.server.process import TritonServer
from trieton_client import Client, ServerError
from typer.testing import CliRunner

CATALOGUE = tiny_catalogue()


@pytest.fixture(scope="module")
def repository(tiny_bundle, make_tiny_retriever, tmp_path_factory):
    """`generative_retriever` asks version 3 of `retriever_prefill` and `retriever_decode`; `lost` asks version 4."""
    root = tmp_path_factory.mktemp("bls")
    exported = make_tiny_retriever(SIZES)
    index = Bundle.open(tiny_bundle).index
    write_graph_models(exported, root / "models", version=3, backend="python")
    for name, version in (("generative_retriever", 3), ("lost", 4)):
        model = root / "models" / name
        model.mkdir(parents=True)
        (model / "config.pbtxt").write_text(render_config(name=name))
        write_bls_retriever(exported, root / f"asks-{version}", version=version)
        write_bundle(root / f"bundle-{version}", index=index, retriever_dir=root / f"asks-{version}")
        shutil.copytree(root / f"bundle-{version}", model / "1")
    return root / "models"


@pytest.mark.server
def test_models_of_the_server_give_the_answers_of_the_engine_inside(repository, tiny_bundle):
    searcher = Searcher(Bundle.open(tiny_bundle), threads=1)
    models = ("retriever_prefill", "retriever_decode", "generative_retriever", "lost")
    with TritonServer(repository, load=models) as server, Client(server.grpc_url) as client:
        for options in (
            {"history": [1003, 1010], "num_results": 10},
            {"history": CATALOGUE.ids[:40], "num_results": 30, "constraint": "even", "exclude": [1004]},
            {"history": [1003], "num_results": 1, "beam_width": 1},
        ):
            got = client.retrieve(**options)
            (want,) = searcher.search([Query(**options)])
            assert got.item_ids.tolist() == want.item_ids.tolist()
            assert got.scores.tolist() == pytest.approx(want.scores.tolist(), abs=1e-4)
        many = client.retrieve([[item] for item in CATALOGUE.ids[:40]], num_results=3)
        assert [len(one) for one in many] == [3] * 40
        # A version that is not there is an error of that model, never an answer of another version.
        with (
            Client(server.grpc_url, model="lost") as lost,
            pytest.raises(ServerError) as caught,
        ):
            lost.retrieve([1003])
        assert caught.value.reason == "the search failed"
        assert client.retrieve([1003]).num_results == 10


@pytest.mark.server
def test_a_bundle_is_published_with_the_models_that_it_asks(repository, tiny_bundle, tmp_path, make_tiny_retriever):
    """The throw-away server gets the two models; the real one, which serves another bundle, loads them first."""
    models = tmp_path / "models"
    publish(tiny_bundle, models, servers=[], preflight=False)
    write_graph_models(make_tiny_retriever(SIZES), models, version=2, backend="python")
    bundle = repository.parent / "bundle-3"
    with pytest.raises(RolloutError, match=r"asks model retriever_decode, version 3, which .* does not have"):
        publish(bundle, models, servers=[], dry_run=True)
    with (
        TritonServer(models) as server,
        Client(server.grpc_url) as client,
    ):
        reach = {"servers": [server.grpc_url], "control_key": server.control_key}
        with pytest.raises(RolloutError, match=r"version 3, which .* does not have: put it there.*--no-preflight"):
            publish(bundle, models, **reach)
        with pytest.raises(RolloutError, match="retriever_decode, version 3, which is unknown there: load it first"):
            publish(bundle, models, **reach, preflight=False)
        assert client.retrieve([1003]).bundle_id == Bundle.open(tiny_bundle).bundle_id
        for name in ("retriever_prefill", "retriever_decode"):
            shutil.copytree(repository / name / "3", models / name / "3")
        done = publish(bundle, models, **reach)
        assert done.outcome == "serving"
        assert client.retrieve([1003]).bundle_id == done.bundle_id
    # A server that starts on a later bundle does not hold them, and goes back to this one.
    publish(tiny_bundle, models, servers=[], preflight=False)
    with TritonServer(models) as server, Client(server.grpc_url) as client:
        rollback(models, servers=[server.grpc_url], control_key=server.control_key)
        assert client.retrieve([1003]).bundle_id == done.bundle_id
    config = models / "retriever_decode" / "config.pbtxt"
    config.write_text(config.read_text().replace('backend: "python"', 'backend: "onnxruntime"'))
    with pytest.raises(RolloutError, match="'onnxruntime' is not in the throw-away server"):
        publish(bundle, models, servers=[], dry_run=True)


def test_such_a_bundle_opens_nowhere_else(repository):
    bundle = Bundle.open(repository / "generative_retriever" / "1")
    with pytest.raises(ValueError, match="engine bls: this retriever is a model of the server"):
        bundle.load_retriever()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": -1}, "decode: version: expected a number from 1, got -1"),
        ({"version": "3"}, "decode: version: expected a number from 1, got '3'"),
        ({"model": "../other"}, "decode: model: expected a name, got '../other'"),
        ({"outputs": ["logits"]}, "decode: outputs: expected names with 'logits' and 'log_z' among them"),
        ({"outputs": ["logits", "log_z"]}, "decode: outputs: expected names with 'present.' among them"),
        (None, r"models.json: not usable \(KeyError: 'decode'\)"),
    ],
)
def test_a_bundle_that_asks_for_no_usable_model_is_not_published(repository, tiny_bundle, tmp_path, change, text):
    retriever = shutil.copytree(repository.parent / "asks-3", tmp_path / "retriever")
    models = json.loads((retriever / "models.json").read_text())
    decode = models.pop("decode")
    if change is not None:
        models["decode"] = decode | change
    (retriever / "models.json").write_text(json.dumps(models))
    write_bundle(tmp_path / "bundle", index=Bundle.open(tiny_bundle).index, retriever_dir=retriever)
    with pytest.raises(RolloutError, match=text):
        publish(tmp_path / "bundle", tmp_path / "models", servers=[], preflight=False)
    assert not (tmp_path / "models").exists()


def test_serve_loads_the_models_of_the_version_that_will_answer(repository, tiny_bundle, tmp_path, monkeypatch):
    """Those of an older one may be gone, and the server does not start without a model that it is told to load."""
    told = []

    def note(*_: object, load: tuple[str, ...], **__: object) -> None:
        told.append(load)
        raise OSError("not started here")

    monkeypatch.setattr("trieton_builder.server.process.TritonServer", note)
    for bundle in (repository.parent / "bundle-3", tiny_bundle):
        publish(bundle, tmp_path / "models", servers=[], preflight=False)
        CliRunner().invoke(app, ["serve", str(tmp_path / "models")])
    name = "generative_retriever"
    assert told == [(name, "retriever_decode", "retriever_prefill"), (name,)]


def test_the_onnx_backend_gets_the_graph_itself(make_tiny_retriever, tmp_path):
    exported = make_tiny_retriever(SIZES)
    write_graph_models(exported, tmp_path, prefix="mine", backend="onnxruntime")
    assert (tmp_path / "mine_decode/1/model.onnx").read_bytes() == (exported / "decode.onnx").read_bytes()
    config = (tmp_path / "mine_decode/config.pbtxt").read_text()
    assert 'backend: "onnxruntime"' in config
    assert 'name: "past_key_values.0.key"' in config
    with pytest.raises(ValueError, match="backend: expected 'onnxruntime' or 'python', got 'tensorrt'"):
        write_graph_models(exported, tmp_path / "x", backend="tensorrt")
    assert not (tmp_path / "x").exists()
