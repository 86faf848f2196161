"""One request of many rows, and one bad request among good ones: who gets which answer, and what is told about it."""

import json
import queue
import threading
import time

import numpy as np
import pytest
import tritonclient.grpc as triton
from scraped import scrape, settled, value
from test_serving import CATALOGUE, MODEL, post, tensors
from trieton.bundle import Bundle
from trieton.search.searcher import Query, Searcher
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.server
SLOW = "slow_retriever"
NAMES = {"history": "INT64", "input_ids": "INT32", "include_items": "INT64", "exclude_items": "INT64"}


@pytest.fixture(scope="module")
def raw(served):
    with triton.InferenceServerClient(served.grpc_url) as client:
        yield client


@pytest.fixture(scope="module")
def searcher(tiny_bundle):
    return Searcher(Bundle.open(tiny_bundle))


def rows(text: bool = False, **lists: list) -> list[triton.InferInput]:
    """Tensors of several rows, as they are given."""
    made = []
    for name, values in lists.items():
        if text and name != "input_ids":
            array, datatype = np.array(values, object), "BYTES"
        else:
            array, datatype = np.array(values, np.int32 if name == "input_ids" else np.int64), NAMES[name]
        made.append(triton.InferInput(name, array.shape, datatype).set_data_from_numpy(array))
    return made


def generate(served, model: str = MODEL, **fields: object) -> tuple[int, dict]:
    status, text = post(f"http://{served.http_url}/v2/models/{model}/generate", fields)
    return status, json.loads(text)


# ---- one bad request among good ones


def no_rows() -> list[triton.InferInput]:
    return [
        triton.InferInput("history", [0, 0], "INT64").set_data_from_numpy(np.zeros((0, 0), np.int64)),
    ]


@pytest.mark.case("W18")
def test_a_request_of_no_rows_is_refused_and_those_in_its_batch_are_answered(served, raw):
    """Two large requests run, one after the other; everything behind them waits and so shares a batch."""
    history = np.arange(1000, 1032).reshape(32, 1)
    large = triton.InferInput("history", history.shape, "INT64").set_data_from_numpy(history)
    small = rows(history=[[1003]])
    before = settled(served.metrics_url)
    told: queue.Queue = queue.Queue()

    def waiting() -> float:
        return value(scrape(served.metrics_url), "nv_inference_pending_request_count", model=SLOW)

    def over_http() -> None:
        body = {"inputs": [{"name": "history", "shape": [0, 0], "datatype": "INT64", "data": []}]}
        told.put(("http", *post(f"http://{served.http_url}/v2/models/{SLOW}/infer", body)))

    # Requests of one stream are queued in their order: those without rows never wait alone.
    raw.start_stream(lambda result, error: told.put(("stream", result, error)))
    try:
        for place, inputs in enumerate([[large], [large], small, no_rows(), small]):
            parameters = {"beam_width": 256} if place < 2 else {"num_results": 5}
            raw.async_stream_infer(SLOW, inputs, request_id=str(place), parameters=parameters)
        deadline = time.monotonic() + 20
        while waiting() < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        another = threading.Thread(target=over_http)
        another.start()
        answers = [told.get(timeout=60) for _ in range(6)]
        another.join()
    finally:
        raw.stop_stream()
    (http,) = [answer for answer in answers if answer[0] == "http"]
    assert http[1] == 400, http
    assert "expected at least one row, got none" in http[2]
    results = [result for kind, result, *_ in answers if kind == "stream" and result is not None]
    errors = [answer[2] for answer in answers if answer[0] == "stream" and answer[2] is not None]
    assert [error.message() for error in errors if "expected at least one row" not in error.message()] == []
    assert len(errors) == 1
    assert sorted(len(result.as_numpy("item_ids")) for result in results) == [1, 1, 32, 32]
    after = settled(served.metrics_url)
    refused = [value(series, "trieton_searches_total", model=SLOW, outcome="invalid") for series in (before, after)]
    assert refused[1] - refused[0] == 2


@pytest.mark.case("W18")
def test_tensors_whose_rows_disagree_are_refused(raw):
    with pytest.raises(InferenceServerException) as caught:
        raw.infer(MODEL, rows(history=[[1003]], include_items=[[1003], [1004]]))
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert "batch size" in caught.value.message()


# ---- lists that name nothing


@pytest.mark.case("W19")
def test_an_include_list_that_names_nothing_allows_nothing(raw):
    answer = raw.infer(MODEL, rows(history=[[1003]] * 3, include_items=[[1004, 1010], [-1, -1], [-1, 1006]]))
    assert answer.as_numpy("num_results").ravel().tolist() == [2, 0, 1]
    assert answer.as_numpy("error").ravel().tolist() == [b"", b"", b""]
    assert set(answer.as_numpy("item_ids")[0, :2].tolist()) == {1004, 1010}
    assert answer.as_numpy("item_ids")[2, 0] == 1006
    alone = raw.infer(MODEL, tensors([1003], include=[-1]))
    assert alone.as_numpy("num_results").tolist() == [[0]]
    assert (alone.as_numpy("item_ids") == -1).all()


@pytest.mark.case("W19")
def test_an_include_list_of_empty_texts_allows_nothing(raw):
    sent = rows(True, history=[[b"item-1003"]] * 2, include_items=[[b"item-1004"], [b""]])
    answer = raw.infer("text_retriever", sent)
    assert answer.as_numpy("num_results").ravel().tolist() == [1, 0]
    alone = raw.infer("text_retriever", rows(True, history=[[b"item-1003"]], include_items=[[b""]]))
    assert alone.as_numpy("num_results").tolist() == [[0]]


@pytest.mark.case("W19")
def test_a_tensor_without_width_is_no_list_and_padding_excludes_nothing(served, raw):
    want = raw.infer(MODEL, rows(history=[[1003]])).as_numpy("item_ids").tolist()
    for sent in (tensors([1003], include=[], exclude=[-1]), tensors([1003], exclude=[-1, -1])):
        assert raw.infer(MODEL, sent).as_numpy("item_ids").tolist() == want
    nothing = [[], []]
    two = rows(history=[[1003]] * 2, include_items=nothing, input_ids=nothing, exclude_items=nothing)
    assert raw.infer(MODEL, two).as_numpy("item_ids").tolist() == want * 2
    assert generate(served, history=[1003], include_items=[])[1]["item_ids"] == want[0]
    assert generate(served, history=[1003], include_items=[-1])[1]["num_results"] == 0


# ---- one bad row among good ones


@pytest.mark.case("W20")
def test_a_row_without_a_usable_history_gets_its_own_error_and_the_others_are_answered(raw, searcher):
    history = [[1003, 1010], [7, 8], [-1, -1], [1004, -1], [1005, 9]]
    answer = raw.infer(MODEL, rows(history=history), parameters={"num_results": 4, "constraint": "even"})
    errors = [text.decode() for text in answer.as_numpy("error").ravel()]
    assert [bool(text) for text in errors] == [False, True, True, False, False]
    assert errors[1].startswith("INVALID_ARGUMENT: history: none of the 2 item ids")
    assert errors[2].startswith("INVALID_ARGUMENT: history, input_ids: expected one of them, got neither")
    for place, known in ((0, [1003, 1010]), (3, [1004]), (4, [1005, 9])):
        (want,) = searcher.search([Query(known, num_results=4, constraint="even")])
        assert answer.as_numpy("item_ids")[place].tolist() == want.item_ids.tolist()
        assert answer.as_numpy("num_unknown")[place, 0] == want.num_unknown
    for place in (1, 2):
        assert answer.as_numpy("num_results")[place, 0] == 0
        assert (answer.as_numpy("item_ids")[place] == -1).all()
        assert not answer.as_numpy("certified")[place, 0]
        assert np.isfinite(answer.as_numpy("scores")[place]).all()


@pytest.mark.case("W20")
def test_a_caller_who_does_not_ask_for_errors_is_told_the_first_one_with_its_row(raw):
    wanted = [triton.InferRequestedOutput(name) for name in ("item_ids", "num_results")]
    with pytest.raises(InferenceServerException, match="row 1: history: none of the 1 item ids"):
        raw.infer(MODEL, rows(history=[[1003], [7], [1004]]), outputs=wanted)


@pytest.mark.case("W20")
def test_a_request_fails_where_no_row_has_an_answer(raw):
    with pytest.raises(InferenceServerException, match="row 0: history: none of the 1 item ids") as caught:
        raw.infer(MODEL, rows(history=[[7], [8]]))
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(InferenceServerException, match="num_results: expected 1 to 100, got 0"):
        raw.infer(MODEL, rows(history=[[1003], [1004]]), parameters={"num_results": 0})


# ---- unknown ids


@pytest.mark.case("W42")
def test_unknown_ids_of_histories_and_of_lists_are_counted_apart(raw):
    sent = rows(history=[[1003, 5, 5], [1003, 1004, 1005]], include_items=[[6, 7, 1004], [8, 8, -1]])
    answer = raw.infer(MODEL, sent)
    assert answer.as_numpy("num_unknown").ravel().tolist() == [2, 0]
    assert answer.as_numpy("num_unknown_listed").ravel().tolist() == [2, 1]
    assert answer.as_numpy("num_results").ravel().tolist() == [1, 0]
    both = raw.infer(MODEL, tensors([1003], include=[5, 1004], exclude=[6, 7]))
    assert both.as_numpy("num_unknown_listed").tolist() == [[3]]


@pytest.mark.case("W42")
@pytest.mark.parametrize(
    ("model", "sent", "text"),
    [
        (MODEL, tensors([1003, 5, 6]), "history: 2 of 3 item ids are not in the catalogue of this version: 5, 6"),
        (MODEL, tensors([1003], include=[5]), "include: 1 of 1 item ids are not in the catalogue of this version: 5"),
        (MODEL, tensors([1003], exclude=range(1, 9)), "exclude: 8 of 8 item ids are not .*: 1, 2, 3, 4, 5, ..."),
        ("text_retriever", rows(True, history=[[b"item-1003", "zoë".encode()]]), "1 of 2 item ids are not .*: 'zoë'"),
    ],
)
def test_strict_refuses_unknown_ids_by_name(raw, model, sent, text):
    with pytest.raises(InferenceServerException, match=text) as caught:
        raw.infer(model, sent, parameters={"strict": True})
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    answer = raw.infer(model, sent, parameters={"strict": False})
    assert answer.as_numpy("num_unknown")[0, 0] + answer.as_numpy("num_unknown_listed")[0, 0] > 0


def test_strict_passes_known_ids_and_takes_true_or_false_only(raw):
    known = tensors([1003], include=[1004], exclude=[1005])
    assert raw.infer(MODEL, known, parameters={"strict": True}).as_numpy("num_results")[0, 0] == 1
    for name in ("strict", "describe"):
        with pytest.raises(InferenceServerException, match=f"{name}: expected true or false, got 1"):
            raw.infer(MODEL, known, parameters={name: 1})


# ---- what a version says about itself


def test_a_version_describes_itself(served, raw, searcher):
    answer = raw.infer(MODEL, tensors(), parameters={"describe": True})
    assert {output.name for output in answer.get_response().outputs} == {"description", "bundle_id"}
    (text,) = answer.as_numpy("description").ravel()
    described = json.loads(text)
    index = searcher.index
    assert (described["model"], described["version"]) == (MODEL, 1)
    assert described["bundle_id"] == searcher.bundle.bundle_id == answer.as_numpy("bundle_id")[0, 0].decode()
    assert (described["item_id_type"], described["num_items"]) == ("int64", len(CATALOGUE.ids))
    assert (described["num_levels"], described["codebook_sizes"]) == (index.num_levels, list(index.codebook_sizes))
    assert described["sets"] == {name: len(held) for name, held in CATALOGUE.sets.items()}
    assert described["base_constraint"] is None
    assert described["limits"]["num_results"] == {"default": 10, "max": 100}
    assert described["limits"]["max_batch_size"] == 32
    assert described["prompt"]["max_items"] == searcher.retriever.spec.prompt.max_items
    assert {"num_results", "beam_width", "constraint", "strict", "describe"} <= described["parameters"].keys()
    status, flat = generate(served, "text_retriever", history=[], describe=True)
    assert (status, json.loads(flat["description"])["item_id_type"]) == (200, "string")


def test_only_who_asks_is_sent_the_description(raw):
    everything = raw.infer(MODEL, tensors([1003]))
    assert "description" not in {output.name for output in everything.get_response().outputs}
    wanted = [triton.InferRequestedOutput("item_ids")]
    with pytest.raises(InferenceServerException, match="expected the output `description`"):
        raw.infer(MODEL, tensors([1003]), outputs=wanted, parameters={"describe": True})
    assert raw.infer(MODEL, tensors([1003]), parameters={"describe": False}).as_numpy("num_results")[0, 0] == 10


# ---- the generate endpoint


@pytest.mark.case("W41")
def test_generate_takes_names_and_gives_one_flat_object(served, searcher):
    (want,) = searcher.search([Query([1003, 5], num_results=5, constraint="even", exclude=[1004])])
    status, answer = generate(served, history=[1003, 5], num_results=5, constraint="even", exclude_items=[1004])
    assert status == 200, answer
    assert answer["item_ids"] == want.item_ids.tolist()
    assert answer["scores"] == pytest.approx(want.scores.tolist(), abs=1e-5)
    assert answer["codes"] == want.codes.ravel().tolist()
    assert (answer["num_results"], answer["num_unknown"], answer["error"]) == (5, 1, "")
    assert answer["bundle_id"] == searcher.bundle.bundle_id
    assert generate(served, history=1003, num_results=1)[1]["num_results"] == 1, "a number is a list of one"
    (text_want,) = generate(served, "text_retriever", history=["item-1003"], num_results=1)[1:]
    assert text_want["item_ids"].startswith("item-")
    ensemble = generate(served, "recommend", history=[1003])[1]
    assert ensemble["item_ids"] == generate(served, history=[1003])[1]["item_ids"]
    status, stream = post(
        f"http://{served.http_url}/v2/models/{MODEL}/generate_stream", {"history": [1003], "num_results": 2}
    )
    assert (status, json.loads(stream.removeprefix("data: "))["num_results"]) == (200, 2)


@pytest.mark.case("W41")
@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"history": [1003], "constraint": "even and ("}, 400, "constraint: character"),
        ({"history": [1003], "constraint": "EVEN"}, 400, "did you mean 'even'?"),
        ({"history": [1003], "num_results": 101}, 400, "num_results: expected 1 to 100, got 101"),
        ({"history": [1003], "num_result": 5}, 400, "parameter 'num_result'"),
        ({"history": []}, 400, "history, input_ids: expected one of them, got neither"),
        ({"history": [7]}, 400, "none of the 1 item ids"),
        ({"num_results": 5}, 400, "request has 0 inputs"),
        ({"history": [1003], "constraint": None}, 400, "parameter 'constraint' has invalid type"),
        ({"history": ["a"]}, 500, "Unable to parse 'data'"),
    ],
)
def test_generate_says_what_is_wrong(served, fields, status, text):
    got, answer = generate(served, **fields)
    assert got == status, answer
    assert text in answer["error"]
