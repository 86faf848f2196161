"""Telling a running server which versions to hold."""

import itertools
import json
import time
from typing import Any

import numpy as np
import tritonclient.grpc
from google.protobuf import json_format, text_format
from trieton_client.address import Address
from trieton_client.channel import channel_options
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException, triton_to_np_dtype

from trieton_builder.rollout.errors import NoControlError, RolloutError, ServerGoneError
from trieton_builder.rollout.repository import Repository
from trieton_builder.server.checks import load_failure
from trieton_builder.server.process import GRPC_KEY_HEADER

QUICK = 10.0  # seconds for calls that only ask
BUSY = "queue size"  # what the server says when a queue is full


class ServerControl:
    """The model-control endpoints of one server, over gRPC.

    Versions are chosen by handing the server the repository's own configuration with a policy `specific [...]`. The
    server compares everything but the policy, so versions that stay are not touched (seen): going back to one that is
    resident takes 2 ms. Requests without a version number are answered by the highest one loaded.

    Args:
        url: host:port of its gRPC endpoint.
        repository: the repository that this server reads.
        key: opens the restricted endpoints; empty for a server without restriction.
        load_timeout: seconds that a load may take.
    """

    def __init__(self, url: str, repository: Repository, *, key: str = "", load_timeout: float = 600.0):
        self.url = url
        self.repository = repository
        self.model = repository.model
        self.load_timeout = load_timeout
        self._headers = {GRPC_KEY_HEADER: key} if key else {}
        self._address = Address.parse(url)
        self._client = self._connect()
        self._met = False  # whether it has answered anything

    def _connect(self) -> tritonclient.grpc.InferenceServerClient:
        return tritonclient.grpc.InferenceServerClient(
            self._address.target, channel_args=channel_options(self._address)
        )

    def close(self) -> None:
        self._client.close()

    def states(self, model: str | None = None) -> dict[int, tuple[str, str]]:
        """{version: (state, reason)} of every version of the model, or of another, that the server has ever seen."""
        wanted = model or self.model
        index = self._call("repository index", "get_model_repository_index")
        return {
            int(entry.version): (entry.state, entry.reason)
            for entry in index.models
            if entry.name == wanted and entry.version
        }

    def ready_versions(self) -> list[int]:
        """Versions that answer requests, ascending; the last one answers those without a version number."""
        return sorted(version for version, (state, _) in self.states().items() if state == "READY")

    def load(self, versions: list[int]) -> None:
        """Hold exactly these versions: new ones are initialised first, then the others drain and are finalized.

        The endpoint's own answer is no proof (a plain load of a dead model says 200): call `wait_ready` as well.

        Raises:
            NoControlError: the server watches the repository by itself (POLL mode) and takes no orders.
            RolloutError: with the server's reason.
        """
        self._call(
            f"load of version {versions[-1]}",
            "load_model",
            self.model,
            config=self._config(versions),
            timeout=self.load_timeout,
        )

    def load_other(self, model: str) -> None:
        """Load another model of the repository by its own configuration. Raises as `load` does."""
        self._call(f"load of {model}", "load_model", model, timeout=self.load_timeout)

    def fault(self, version: int | None, bundle_id: str | None = None) -> str | None:
        """Why a real request to a version gets no answer; None when it is answered.

        A version whose process has died is READY to the server while each of its requests fails (seen). The request is
        one small search of one token, which needs no item of the catalogue. A full queue is a sign of life.

        Args:
            version: None asks the version that answers requests without a number.
            bundle_id: the bundle that has to answer; None for any.

        Raises:
            ServerGoneError: the server itself is away.
        """
        number = "" if version is None else str(version)
        try:
            found = self._small_search(number)
        except InferenceServerException as error:
            text, status = (error.message() or "").strip(), str(error.status() or "")
            if BUSY in text:
                return None
            self.states()  # raises where it is the server that is away
            return f"no answer within {QUICK:g} s" if status.endswith("DEADLINE_EXCEEDED") else text or status
        return None if bundle_id in (None, found) else f"bundle {found} answers, expected {bundle_id}"

    def _small_search(self, version: str) -> str:
        """Bundle id of the answer to a search of one token, one beam and one result."""
        # All inputs that the model declares, empty but for the prompt: as every client of ours sends them.
        declared = self._client.get_model_config(self.model, headers=self._headers, client_timeout=QUICK).config.input
        inputs = []
        for tensor in declared:
            kind = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_").replace("STRING", "BYTES")
            values = np.zeros((1, 1 if tensor.name == "input_ids" else 0), triton_to_np_dtype(kind))
            inputs.append(tritonclient.grpc.InferInput(tensor.name, list(values.shape), kind))
            inputs[-1].set_data_from_numpy(values)
        answer = self._client.infer(
            self.model,
            inputs,
            model_version=version,
            parameters={"num_results": 1, "beam_width": 1},
            client_timeout=QUICK,
        )
        return answer.as_numpy("bundle_id")[0, 0].decode()

    def unload(self) -> None:
        """Hold no version."""
        self._call("unload", "unload_model", self.model)

    def wait_ready(self, version: int, timeout: float = 30.0, *, highest: bool = True) -> None:
        """Wait until the repository index says that `version` is READY and, with `highest`, that no higher one is."""
        deadline = time.monotonic() + timeout
        while True:
            states = self.states()
            ready = [number for number, (state, _) in states.items() if state == "READY"]
            if version in ready and (not highest or max(ready) == version):
                return
            state, reason = states.get(version, ("unknown to the server", ""))
            if time.monotonic() > deadline:
                raise RolloutError(
                    f"{self.url}: version {version} is {state} after {timeout:g} s"
                    + (f" ({reason})" if reason else "")
                    + (f"; version {max(ready)} answers" if ready else "; no version answers")
                )
            time.sleep(0.01)

    def server_ready(self) -> bool:
        """The server's own readiness; with strict readiness any version it once unloaded turns this false (seen)."""
        return self._call("readiness", "is_server_ready")

    def _config(self, versions: list[int]) -> str:
        try:
            parsed = text_format.Parse(self.repository.config.read_text(), model_config_pb2.ModelConfig())
        except text_format.ParseError as error:
            raise RolloutError(f"{self.repository.config}: {error}") from None
        config = json_format.MessageToDict(parsed, preserving_proto_field_name=True)
        config["version_policy"] = {"specific": {"versions": versions}}
        return json.dumps(config)

    def _call(self, what: str, method: str, *arguments: Any, timeout: float | None = None, **options: Any) -> Any:
        """Call a method of tritonclient's client.

        All of them may be called twice: loads and unloads say what is to be there, not what is to be done. So a call
        whose connection was lost, or that got no answer in the short time of a question, is repeated on a new one: a
        relay or a firewall in between may have forgotten the old one while a long load ran.

        Args:
            timeout: seconds that a load may take, over all tries; None for a question.

        Raises:
            NoControlError, RolloutError: see `load`.
        """
        quick = timeout is None
        end = time.monotonic() + (timeout or 2 * QUICK)
        for attempt in itertools.count():
            started = time.monotonic()
            try:
                answer = getattr(self._client, method)(
                    *arguments,
                    headers=self._headers,
                    client_timeout=max(0.1, min(timeout or QUICK, end - started)),
                    **options,
                )
            except InferenceServerException as error:
                now = time.monotonic()
                # A connection that lasted for a while was a good one, so its loss is worth another try each time.
                again = now < end - 0.1 and (attempt == 0 or now - started > 1)
                if not (again and _is_lost(error, quick=quick)):
                    raise self._error(what, error, timeout or QUICK) from None
                self._client.close()
                self._client = self._connect()
            else:
                self._met = True
                return answer
        raise AssertionError("unreachable")

    def _error(self, what: str, error: InferenceServerException, timeout: float) -> RolloutError:
        text, status = (error.message() or "").strip(), str(error.status() or "")
        if "load / unload is not allowed" in text:
            return NoControlError(f"{self.url}: {what}: {text}")
        if "restricted" in text:
            return RolloutError(
                f"{self.url}: {what} needs the control key; name it in TRIETON_CONTROL_KEY or --key-file ({text})"
            )
        if status.endswith("DEADLINE_EXCEEDED"):
            return ServerGoneError(f"{self.url}: the server hangs: no answer to the {what} within {timeout:g} s")
        if status.endswith(("UNAVAILABLE", "CANCELLED")):
            if self._met:
                return ServerGoneError(f"{self.url}: the server went away during the {what}")
            return ServerGoneError(
                f"{self.url}: no server answers there; is it running, and is this its gRPC port? ({text})"
                f"{self._address.proxy_hint()}"
            )
        reason = load_failure(text)
        if reason is None and not self._lives():  # a broken connection has many texts and states of its own
            return ServerGoneError(f"{self.url}: the server went away during the {what}")
        return RolloutError(f"{self.url}: {reason or f'{what} failed: {text or error.status()}'}")

    def _lives(self) -> bool:
        try:
            return self._client.is_server_live(headers=self._headers, client_timeout=QUICK)
        except InferenceServerException:
            return False


def _status(error: InferenceServerException) -> str:
    return str(error.status() or "").removeprefix("StatusCode.")


def _is_lost(error: InferenceServerException, *, quick: bool) -> bool:
    """Whether a call failed by its connection, or (where answers come at once) waited in vain."""
    status = _status(error)
    if status == "UNAVAILABLE":  # the server says so, too, where a call is restricted
        return "restricted" not in (error.message() or "")
    return quick and status == "DEADLINE_EXCEEDED"
