"""Telling a running server which versions to hold."""

import itertools
import json
import time
from typing import Any

import tritonclient.grpc
from google.protobuf import json_format, text_format
from trieton_client.address import Address
from trieton_client.channel import channel_options
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException

from trieton_builder.rollout.errors import NoControlError, RolloutError
from trieton_builder.rollout.repository import Repository
from trieton_builder.server.checks import load_failure
from trieton_builder.server.process import GRPC_KEY_HEADER

QUICK = 10.0  # seconds for calls that only ask


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

    def unload(self) -> None:
        """Hold no version."""
        self._call("unload", "unload_model", self.model)

    def wait_ready(self, version: int, timeout: float = 30.0) -> None:
        """Wait until the repository index says that `version` is READY, and that no higher one is."""
        deadline = time.monotonic() + timeout
        while True:
            states = self.states()
            ready = [number for number, (state, _) in states.items() if state == "READY"]
            if ready and max(ready) == version:
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
                return getattr(self._client, method)(
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
                    raise self._explained(what, error) from None
            self._client.close()
            self._client = self._connect()
        raise AssertionError("unreachable")

    def _explained(self, what: str, error: InferenceServerException) -> RolloutError:
        text = (error.message() or "").strip()
        if "load / unload is not allowed" in text:
            return NoControlError(f"{self.url}: {what}: {text}")
        if "restricted" in text:
            return RolloutError(
                f"{self.url}: {what} needs the control key; name it in TRIETON_CONTROL_KEY or --key-file ({text})"
            )
        reason = load_failure(text)
        hint = self._address.proxy_hint() if _status(error) in ("UNAVAILABLE", "DEADLINE_EXCEEDED") else ""
        return RolloutError(f"{self.url}: {reason or f'{what} failed: {text or error.status()}{hint}'}")


def _status(error: InferenceServerException) -> str:
    return str(error.status() or "").removeprefix("StatusCode.")


def _is_lost(error: InferenceServerException, *, quick: bool) -> bool:
    """Whether a call failed by its connection, or (where answers come at once) waited in vain."""
    status = _status(error)
    if status == "UNAVAILABLE":  # the server says so, too, where a call is restricted
        return "restricted" not in (error.message() or "")
    return quick and status == "DEADLINE_EXCEEDED"
