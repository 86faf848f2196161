"""The served model on the real server: requests of every form, unlike requests in one batch, errors one by one."""

import json
import queue
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.grpc as triton
from tiny_bundle import tiny_catalogue
from trieton.bundle import Bundle
from trieton.search.searcher import Query, Searcher
from trieton_client import Client
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.server
MODEL = "generative_retriever"
CATALOGUE = tiny_catalogue()


@pytest.fixture(scope="module")
def client(served):
    with Client(served.grpc_url) as client:
        yield client


@pytest.fixture(scope="module")
def raw(served):
    with triton.InferenceServerClient(served.grpc_url) as client:
        yield client


@pytest.fixture(scope="module")
def searcher(tiny_bundle):
    return Searcher(Bundle.open(tiny_bundle))


def tensors(history=(), input_ids=(), include=(), exclude=()) -> list[triton.InferInput]:
    """All four inputs of one request, as rows of one."""
    made = []
    for name, values, dtype, datatype in (
        ("history", history, np.int64, "INT64"),
        ("input_ids", input_ids, np.int32, "INT32"),
        ("include_items", include, np.int64, "INT64"),
        ("exclude_items", exclude, np.int64, "INT64"),
    ):
        array = np.array(values, dtype).reshape(1, -1)
        made.append(triton.InferInput(name, array.shape, datatype).set_data_from_numpy(array))
    return made


def post(url: str, body: object) -> tuple[int, str]:
    """Status and text of a JSON request, as curl would send it."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json", "connection": "close"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def batch_sizes(raw, model: str) -> dict[int, int]:
    """How many batches of each size the server has executed."""
    (stats,) = raw.get_inference_statistics(model).model_stats
    return {entry.batch_size: entry.compute_infer.count for entry in stats.batch_stats}


UNLIKE = [
    {
        "history": CATALOGUE.ids[:n],
        "num_results": k,
        "beam_width": max(k, m),
        "constraint": c,
        "exclude": e,
        "include": i,
    }
    for n, k, m, c, e, i in [
        (1, 1, 1, None, None, None),
        (2, 3, 20, "even", None, None),
        (40, 10, 64, None, CATALOGUE.ids[:50], None),
        (7, 5, 17, "not even", None, CATALOGUE.ids[40:90]),
        (9, 20, 20, "rare", [1001], None),
        (200, 50, 100, None, None, [1007]),
    ]
]


def test_the_server_gives_what_the_same_search_gives_in_process(client, searcher):
    for options in UNLIKE:
        results = client.retrieve(**options)
        (answer,) = searcher.search([Query(**options)])
        assert results.item_ids.tolist() == answer.item_ids.tolist()
        assert results.scores.tolist() == answer.scores.tolist()
        assert results.codes.tolist() == answer.codes.tolist()
        assert (results.certified, results.bundle_id) == (answer.certified, searcher.bundle.bundle_id)


def test_string_ids_go_in_and_come_out(served):
    with Client(served.grpc_url, model="text_retriever") as text, Client(served.http_url, "http") as number:
        strings = text.retrieve(["item-1003", "zoë", "item-1010"], exclude=["item-1004"], constraint="even")
        integers = number.retrieve([1003, 5, 1010], exclude=[1004], constraint="even")
    assert strings.item_ids.tolist() == [f"item-{item}" for item in integers.item_ids.tolist()]
    assert strings.num_unknown == integers.num_unknown == 1


def test_padding_fills_what_was_asked_for_and_no_more(raw):
    answer = raw.infer(MODEL, tensors([1003], include=[1001, 1002]), parameters={"num_results": 5})
    assert answer.as_numpy("item_ids")[0, 2:].tolist() == [-1, -1, -1]
    assert answer.as_numpy("scores")[0, 2:].tolist() == [float(np.finfo(np.float32).min)] * 3
    assert answer.as_numpy("codes").shape == (1, 5, 3)
    assert (answer.as_numpy("codes")[0, 2:] == -1).all()
    assert answer.as_numpy("num_results").tolist() == [[2]]


def test_only_the_outputs_asked_for_are_sent(raw):
    wanted = [triton.InferRequestedOutput("item_ids"), triton.InferRequestedOutput("num_results")]
    answer = raw.infer(MODEL, tensors([1003]), outputs=wanted)
    assert {output.name for output in answer.get_response().outputs} == {"item_ids", "num_results"}


def test_optional_tensors_may_be_left_out(raw):
    (history, *_rest) = tensors([1003])
    assert raw.infer(MODEL, [history]).as_numpy("num_results")[0, 0] == 10


BAD = [
    ({"history": []}, {}, "history, input_ids: expected one of them, got neither"),
    ({"history": [1003], "input_ids": [5]}, {}, "history, input_ids: expected one of them, got both"),
    ({"history": [5, 6]}, {}, "none of the 2 item ids is in the catalogue"),
    ({"history": [1003]}, {"num_results": 0}, "num_results: expected 1 to 100, got 0"),
    ({"history": [1003]}, {"num_results": -1}, "num_results: expected 1 to 100, got -1"),
    ({"history": [1003]}, {"num_results": 101}, "num_results: expected 1 to 100, got 101"),
    ({"history": [1003]}, {"num_results": "ten"}, "num_results: expected an integer from 1 to 100, got 'ten'"),
    ({"history": [1003]}, {"beam_width": 5}, "beam_width: expected at least num_results = 10, got 5"),
    ({"history": [1003]}, {"beam_width": 257}, "beam_width: expected 1 to 256, got 257"),
    ({"history": [1003]}, {"constraint": "no_such"}, "no_such"),
    ({"history": [1003]}, {"constraint": "even and ("}, "character"),
    ({"history": [1003]}, {"constraint": "even " * 20_000}, "8192 characters"),
    ({"history": [1003]}, {"constraint": "not " * 1000 + "even"}, "deep"),
    ({"history": [1003]}, {"constraint": 7}, "constraint: expected text, got 7"),
    ({"history": [1003]}, {"num_result": 5}, "parameter 'num_result': expected one of num_results"),
    ({"history": [1003] * 10_001}, {}, "history: expected at most 10000 item ids, got 10001"),
    ({"input_ids": [1024]}, {}, "input_ids: expected tokens 0 <= token < 1024, got 1024"),
    ({"input_ids": [3, -1, 4]}, {}, "input_ids: expected tokens 0 <= token < 1024, got -1 at place 1"),
    ({"input_ids": [3] * 100}, {}, "input_ids: expected 1 to 64 tokens, got 100"),
]


@pytest.mark.case("S01")
@pytest.mark.case("S02")
@pytest.mark.case("S03")
@pytest.mark.case("S05")
@pytest.mark.case("C03")
@pytest.mark.parametrize(("inputs", "parameters", "text"), BAD, ids=[text[:50] for *_, text in BAD])
def test_a_bad_request_is_an_invalid_argument_that_says_what_was_wrong(raw, inputs, parameters, text):
    with pytest.raises(InferenceServerException) as caught:
        raw.infer(MODEL, tensors(**inputs), parameters=parameters)
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert text in caught.value.message()
    assert "Traceback" not in caught.value.message()
    assert ".py" not in caught.value.message()


@pytest.mark.case("S04")
@pytest.mark.case("C07")
def test_one_bad_request_in_a_batch_of_eight_gives_seven_answers_and_one_error(served, raw):
    """All eight wait while a large request of the slow model is searched, so the server hands them over together."""
    slow = "slow_retriever"
    searcher = Searcher(Bundle.open(served.repository / slow / "1"))
    asked = [{"history": [1003 + i], "parameters": {"num_results": 2 + i, "beam_width": 20 + i}} for i in range(8)]
    asked[3]["parameters"]["constraint"] = "no_such_set"
    asked[5]["exclude"] = list(range(1000, 1250))
    before = batch_sizes(raw, slow).get(8, 0)
    for _ in range(20):
        done, got, lock = threading.Event(), {}, threading.Lock()

        def finish(place, result, error, got=got, lock=lock, done=done):
            with lock:
                got[place] = error or result
                if len(got) == 9:
                    done.set()

        history = np.array([[1000 + i] for i in range(32)])
        large = triton.InferInput("history", history.shape, "INT64").set_data_from_numpy(history)
        raw.async_infer(slow, [large], lambda result, error: finish(8, result, error), parameters={"beam_width": 256})
        for place, request in enumerate(asked):
            raw.async_infer(
                slow,
                tensors(request["history"], exclude=request.get("exclude", ())),
                lambda result, error, place=place: finish(place, result, error),
                parameters=request["parameters"],
            )
        assert done.wait(120)
        if batch_sizes(raw, slow).get(8, 0) > before:
            break
    else:
        pytest.fail("the server never formed a batch of eight")
    assert isinstance(got[3], InferenceServerException)
    assert "no_such_set" in got[3].message()
    for place, request in enumerate(asked):
        if place != 3:
            query = Query(request["history"], exclude=request.get("exclude"), **request["parameters"])
            (answer,) = searcher.search([query])
            assert got[place].as_numpy("item_ids")[0].tolist() == answer.item_ids.tolist()


@pytest.mark.case("S09")
def test_a_hundred_clients_with_histories_of_1_to_200_items_share_batches(served, raw, searcher):
    rng = np.random.default_rng(9)
    before = raw.get_inference_statistics(MODEL).model_stats[0]
    asked = [
        {
            "history": rng.choice(CATALOGUE.ids, n).tolist(),
            "num_results": int(rng.integers(1, 20)),
            "constraint": ("even", None, "not rare")[n % 3],
            "exclude": rng.choice(CATALOGUE.ids, n % 5).tolist(),
        }
        for n in rng.integers(1, 201, 600).tolist()
    ]
    start = threading.Barrier(100)

    def one_client(mine: list[dict]) -> list:
        with Client(served.grpc_url, timeout=120) as client:
            start.wait()
            return [client.retrieve(**options) for options in mine]

    with ThreadPoolExecutor(100) as threads:
        answers = list(threads.map(one_client, [asked[i::100] for i in range(100)]))
    after = raw.get_inference_statistics(MODEL).model_stats[0]
    assert after.inference_count - before.inference_count == len(asked)
    # The same once more without waiting for one another: how many clients get to run does not decide the batches.
    done: queue.Queue[object] = queue.Queue()
    for options in asked:
        request = tensors(options["history"], exclude=options["exclude"])
        parameters = {name: options[name] for name in ("num_results", "constraint") if options[name] is not None}
        raw.async_infer(MODEL, request, lambda result, error: done.put(error), parameters=parameters)
    assert [done.get(timeout=120) for _ in asked] == [None] * len(asked)
    burst = raw.get_inference_statistics(MODEL).model_stats[0]
    assert len(asked) / (burst.execution_count - after.execution_count) > 4
    for place in range(0, len(asked), 37):
        (want,) = searcher.search([Query(**asked[place])])
        assert answers[place % 100][place // 100].item_ids.tolist() == want.item_ids.tolist()


@pytest.mark.case("S06")
def test_json_answers_with_few_or_no_results_are_strict_json(served):
    def refuse(constant):
        raise AssertionError(f"{constant} in the answer")

    for include, found in ([1001], 1), ([1001, 1002, 1003], 3), ([7], 0):
        body = {
            "inputs": [
                {"name": "history", "shape": [1, 1], "datatype": "INT64", "data": [1003]},
                {"name": "include_items", "shape": [1, len(include)], "datatype": "INT64", "data": include},
            ],
            "parameters": {"num_results": 10, "constraint": "even or not even"},
        }
        status, text = post(f"http://{served.http_url}/v2/models/{MODEL}/infer", body)
        assert status == 200, text
        outputs = {o["name"]: o["data"] for o in json.loads(text, parse_constant=refuse)["outputs"]}
        assert outputs["num_results"] == [found]
        assert outputs["item_ids"].count(-1) == 10 - found


def test_http_errors_have_the_status_of_a_client_error(served):
    url = f"http://{served.http_url}/v2/models/{MODEL}/infer"
    for parameters, text in (({"num_results": 1000}, "num_results"), ({"beam_width": 1.5}, "beam_width")):
        body = {
            "inputs": [{"name": "history", "shape": [1, 1], "datatype": "INT64", "data": [1003]}],
            "parameters": parameters,
        }
        status, answer = post(url, body)
        assert status == 400
        assert text in json.loads(answer)["error"]


def test_parameters_that_are_not_utf8_are_the_fault_of_their_own_request(served):
    body = b'{"inputs":[{"name":"history","shape":[1,1],"datatype":"INT64","data":[1003]}],"parameters":{"constraint":"'
    status, answer = post(f"http://{served.http_url}/v2/models/{MODEL}/infer", body + b'\x8b\xff"}}')
    assert status == 400, answer
    assert "parameters: expected JSON in UTF-8" in answer


def test_the_ensemble_takes_a_history_and_passes_parameters_on(served, raw, client):
    history = triton.InferInput("history", [1, 2], "INT64").set_data_from_numpy(np.array([[1003, 1010]]))
    answer = raw.infer("recommend", [history], parameters={"num_results": 4, "constraint": "even"})
    same = client.retrieve([1003, 1010], num_results=4, constraint="even")
    assert answer.as_numpy("item_ids")[0].tolist() == same.item_ids.tolist()
    assert answer.as_numpy("scores")[0].tolist() == same.scores.tolist()
    assert {output.name for output in answer.get_response().outputs} == {"item_ids", "scores"}
    with pytest.raises(InferenceServerException, match="num_results: expected 1 to 100, got 0"):
        raw.infer("recommend", [history], parameters={"num_results": 0})
