"""The examples of clients/README.md, run as printed against the real server (only the ports are other ones)."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format
from tiny_bundle import tiny_catalogue
from tritonclient.grpc import service_pb2, service_pb2_grpc

pytestmark = pytest.mark.server
TEXT = (Path(__file__).parents[1] / "clients" / "README.md").read_text()
BLOCKS = re.findall(r"(?s)```(python|sh)\n(.*?)```", TEXT)
ALLOWED = set(tiny_catalogue().allowed("even and not rare", exclude=[1004]))


def adapted(block: str, served) -> str:
    return block.replace("127.0.0.1:8001", served.grpc_url).replace("127.0.0.1:8000", served.http_url)


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("place", [place for place, (language, _) in enumerate(BLOCKS) if language == "python"])
def test_python_examples_run_and_print_allowed_items(served, place):
    code = adapted(BLOCKS[place][1], served)
    printed = run(sys.executable, "-c", code)
    if "even and not rare" not in code:
        assert re.search(r"\b1\d{3}\b", printed), printed
        return
    assert len(ALLOWED & {int(word) for word in re.findall(r"\b1\d{3}\b", printed)}) >= 5, printed


def test_the_curl_example_gives_five_allowed_items(served):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    (block,) = (text for language, text in BLOCKS if language == "sh" and text.startswith("curl") and "/infer" in text)
    outputs = {o["name"]: o["data"] for o in json.loads(run("sh", "-c", adapted(block, served)))["outputs"]}
    assert set(outputs) == {"item_ids", "scores", "bundle_id"}
    assert set(outputs["item_ids"]) <= ALLOWED
    (block,) = (
        text for language, text in BLOCKS if language == "sh" and text.startswith("curl") and "/generate " in text
    )
    answer = json.loads(run("sh", "-c", adapted(block, served)))
    assert answer["item_ids"] == outputs["item_ids"]


def test_the_message_of_the_grpcurl_example_gives_five_allowed_items(served):
    """What grpcurl would send, sent without it, since it is rarely installed."""
    (block,) = (text for language, text in BLOCKS if language == "sh" and text.startswith("grpcurl"))
    message = json_format.Parse(block[block.index("{") : block.rindex("}") + 1], service_pb2.ModelInferRequest())
    assert block.split()[-1] == "inference.GRPCInferenceService/ModelInfer"
    with grpc.insecure_channel(served.grpc_url) as channel:
        answer = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(message, timeout=10)
    place = [output.name for output in answer.outputs].index("item_ids")
    raw = answer.raw_output_contents[place]
    ids = [int.from_bytes(raw[i : i + 8], "little", signed=True) for i in range(0, len(raw), 8)]
    assert len(ids) == 5
    assert set(ids) <= ALLOWED
