"""What deploy/SECURITY.md claims, held against the code and the running server."""

import http.client
import io
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from trieton.constraint.expressions import MAX_DEPTH, MAX_NAMES, MAX_TEXT
from trieton.constraint.plane_cache import DEFAULT_MAX_BYTES, TEXT_MAX_BYTES
from trieton.retriever.torch_export import TorchEngine
from trieton.search.searcher import Limits
from trieton_builder.bundle.model_config import MODEL_NAME, render_config
from trieton_builder.server.process import GRPC_KEY_HEADER, KEY_HEADER, RESTRICTED, TritonServer
from tritonclient.grpc import service_pb2, service_pb2_grpc

PAGE = (Path(__file__).parents[1] / "deploy" / "SECURITY.md").read_text()
Entries = dict[str, bytes]


def rows(heading: str) -> dict[str, list[str]]:
    """{what stands in backquotes in the first cell: the other cells} of the table under a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `"):
            found[re.findall(r"`([^`]+)`", cells[0])[0]] = cells[1:]
    assert found, heading
    return found


# Endpoints


def paths(column: str) -> list[tuple[str, str]]:
    """(method, path) of the HTTP endpoints that the page calls open or restricted."""
    return [
        (method, path.replace("MODEL", MODEL_NAME))
        for what, cells in rows("What is exposed").items()
        if cells[0].startswith(column)
        for method, path in [what.split(" ")]
    ]


def methods(column: str) -> list[str]:
    """gRPC methods that the page calls open or restricted."""
    cells = [cells for cells in rows("What is exposed").values() if cells[0].startswith(column)]
    return [name for _, names in cells for name in re.findall(r"`(\w+)`", names)]


def ask(url: str, method: str, path: str, headers: dict[str, str] | None = None) -> int:
    host, port = url.split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    try:
        connection.request(method, path, b"{}" if method == "POST" else None, headers or {})
        return connection.getresponse().status
    finally:
        connection.close()


def call(url: str, name: str, key: str | None = None) -> grpc.StatusCode:
    with grpc.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = getattr(service_pb2, f"{name}Request")()
        for field in {"name", "model_name"} & set(request.DESCRIPTOR.fields_by_name):
            setattr(request, field, MODEL_NAME)
        try:
            getattr(stub, name)(request, timeout=10, metadata=[(GRPC_KEY_HEADER, key)] if key else None)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK


def test_the_page_names_every_grpc_method_of_the_server_once():
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert sorted(methods("open") + methods("key")) == sorted(method.name for method in service.methods)


@pytest.mark.server
def test_restricted_endpoints_answer_nobody_without_the_key_and_open_ones_everybody(served):
    for method, path in paths("key"):
        assert ask(served.http_url, method, path) == 403, path
        assert ask(served.http_url, method, path, {KEY_HEADER: "guess"}) == 403, path
    for name in methods("key"):
        assert call(served.grpc_url, name) == grpc.StatusCode.UNAVAILABLE, name
        assert call(served.grpc_url, name, "guess") == grpc.StatusCode.UNAVAILABLE, name
    for method, path in paths("open"):
        # An empty search is answered with what is wrong with it.
        assert ask(served.http_url, method, path) in ((400, 500) if method == "POST" else (200,)), path
    for name in set(methods("open")) - {"ModelStreamInfer"}:  # a stream says nothing before it is asked
        expected = grpc.StatusCode.INVALID_ARGUMENT if name == "ModelInfer" else grpc.StatusCode.OK
        assert call(served.grpc_url, name) == expected, name
    key = served.control_key
    assert ask(served.http_url, "POST", "/v2/repository/index", {KEY_HEADER: key}) == 200
    assert call(served.grpc_url, "RepositoryIndex", key) == grpc.StatusCode.OK


@pytest.mark.server
def test_the_key_stands_in_the_command_line_and_not_in_the_log(served):
    assert served.control_key in Path(f"/proc/{served.pid}/cmdline").read_text()
    assert served.control_key not in served.log_path.read_text()
    assert served.log_path.parent.stat().st_mode & 0o077 == 0


def test_the_page_names_the_groups_that_are_restricted():
    (groups,) = re.findall(r"groups `([\w,-]+)`", PAGE)
    assert groups == RESTRICTED


# Limits


def test_the_limits_of_the_page_are_those_of_the_code():
    defaults = {name: cells[0].split()[0] for name, cells in rows("Limits of a request").items()}
    claimed = {name: int(default.replace(",", "")) for name, default in defaults.items()}
    config = dict(re.findall(r'key: "(\w+)" value: { string_value: "(\d+)" }', render_config()))
    limits = {name: int(value) for name, value in config.items() if name in vars(Limits())}
    assert limits == vars(Limits())
    (batch,) = re.findall(r"max_batch_size: (\d+)", render_config())
    assert claimed == limits | {
        "max_batch_size": int(batch),
        "MAX_TEXT": MAX_TEXT,
        "MAX_DEPTH": MAX_DEPTH,
        "MAX_NAMES": MAX_NAMES,
        "DEFAULT_MAX_BYTES": DEFAULT_MAX_BYTES >> 20,
        "TEXT_MAX_BYTES": TEXT_MAX_BYTES >> 20,
    }


# What a request can do to the server itself


@pytest.mark.server
def test_one_shape_ends_the_embedded_server_as_the_page_warns(tiny_bundle, tmp_path):
    """When this fails the wheel carries a newer server: the page, the clients' README and the fuzz test can change."""
    model = tmp_path / MODEL_NAME
    model.mkdir()
    (model / "config.pbtxt").write_text(render_config())
    (model / "1").symlink_to(tiny_bundle)
    tensor = {"name": "history", "datatype": "INT64", "shape": [1, 2**62], "data": [1]}
    with TritonServer(tmp_path) as server:
        host, port = server.http_url.split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=20)
        connection.request("POST", f"/v2/models/{MODEL_NAME}/infer", json.dumps({"inputs": [tensor]}))
        with pytest.raises((http.client.HTTPException, OSError)):
            connection.getresponse()
        connection.close()
        assert server._process is not None
        assert server._process.wait(20) != 0


# Pickles


class Touch:
    """Pickles to something that makes a folder when it is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def saved() -> Entries:
    """A harmless program without example inputs, as `torch.export.save` writes it."""

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    program = torch.export.export(Twice(), (torch.zeros(2),))
    program.example_inputs = None
    file = io.BytesIO()
    torch.export.save(program, file)
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def place(entries: Entries, inner: str) -> str:
    return f"{next(iter(entries)).partition('/')[0]}/{inner}"


def pickled_weight(entries: Entries, payload: bytes) -> Entries:
    name = place(entries, "data/weights/model_weights_config.json")
    config = json.loads(entries[name])
    config["config"]["weight"]["use_pickle"] = True
    return entries | {name: json.dumps(config).encode(), place(entries, "data/weights/weight_0"): payload}


def opaque_object(entries: Entries, payload: bytes) -> Entries:
    weights = json.loads(entries[place(entries, "data/weights/model_weights_config.json")])["config"]
    constants = {"config": {"object": weights["weight"] | {"path_name": "opaque_obj_0", "is_param": False}}}
    return entries | {
        place(entries, "data/constants/model_constants_config.json"): json.dumps(constants).encode(),
        place(entries, "data/constants/opaque_obj_0"): payload + bytes(-len(payload) % 4),  # whole floats
    }


def old_weights(entries: Entries, payload: bytes) -> Entries:
    return entries | {place(entries, "data/weights/model.pt"): payload}


def old_layout(entries: Entries, payload: bytes) -> Entries:
    program = entries[place(entries, "models/model.json")]
    old = {f"serialized_{part}.pt": payload for part in ("state_dict", "constants", "example_inputs")}
    version = json.loads(program)["schema_version"]
    return {
        "version": f"{version['major']}.{version['minor']}".encode(),
        "serialized_exported_program.json": program,
        **old,
    }


def machine_code(entries: Entries, payload: bytes) -> Entries:
    return entries | {place(entries, "data/aotinductor/model/model.so"): b"\x7fELF"}


@pytest.mark.parametrize("attack", [pickled_weight, opaque_object, old_weights, old_layout, machine_code])
def test_no_layout_of_a_torch_program_gets_anything_unpickled(attack: Callable[[Entries, bytes], Entries], tmp_path):
    payload = pickle.dumps(Touch(tmp_path / "owned"))
    entries = attack(saved(), payload)
    with zipfile.ZipFile(tmp_path / "prefill.pt2", "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    with pytest.raises(ValueError, match=r"prefill\.pt2: not a usable torch\.export program .*can run code"):
        TorchEngine.open(tmp_path, device="cpu")
    assert not (tmp_path / "owned").exists()
