"""The real server of the wheel, started on a model repository and stopped cleanly.

    with TritonServer("model_repository", load=("generative_retriever",)) as server:
        client = trieton_client.Client(server.grpc_url)

Loopback and free ports by default; the endpoints that control models need a key. What the server does at each step, and
why the command line is as it is, was measured on 2.51.0 and is explained where it is used.
"""

import atexit
import contextlib
import http.client
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from trieton_builder import interrupts
from trieton_builder.bundle.model_config import MODEL_NAME
from trieton_builder.server import launcher, leftovers
from trieton_builder.server.checks import (
    PortTakenError,
    ServerError,
    check_extra_args,
    check_repository,
    choose_ports,
    has_space,
    load_failure,
    loopback,
    refused_option,
)
from trieton_builder.server.installation import REINSTALL, Installation, check_numpy, find_installation, link_backend

KEY_HEADER = "trieton-control-key"
GRPC_KEY_HEADER = f"triton-grpc-protocol-{KEY_HEADER}"  # the prefix is the server's
RESTRICTED = "model-repository,shared-memory,trace,logging"
# Handed on to the models as request parameters. The server looks for the pattern anywhere in a name (seen).
TRACE_HEADERS = "(?i)^(traceparent|tracestate)$"
# Of /dev/shm, per instance: a batch of the longest lists. From the server's 1 MiB it would grow in steps under load.
SHM_BYTES = 16 << 20
PORT_TRIES = 5
PING_MS = 5000  # how often a client may ask over gRPC whether the server is there


class TritonServer:
    """One server process on one model repository.

    Start it from a thread that outlives it: the server is told to end when the thread that started it does.

    Args:
        repository: folder of models.
        model_control: "explicit" (only `load` and the control endpoints load models), "poll" or "none".
        load: models to load at the start (explicit mode); each must have a servable version, or the start fails.
        ports: HTTP, gRPC, metrics; None chooses free ones.
        address: where to listen, an IP address; anything but loopback opens the server to the network.
            None takes 127.0.0.1, or ::1 where there is only that.
        control_key: the secret for the model-control endpoints; None makes a random one.
        strict_readiness: with True, one failed load of a new version turns the server's readiness false although the
            old version serves (seen); False keeps it true, and per-model readiness tells the truth in both cases.
        exit_timeout: seconds the server waits for requests in flight (and idle HTTP connections) when it stops.
        start_timeout: seconds until all models of `load` must be ready.
        poll_seconds: how often poll mode looks.
        niceness: 0 to 19; above 0 the server leaves the processor to others.
        env: extra environment variables for the server and its models.
        trace_endpoint: base address of an OpenTelemetry collector (OTLP over HTTP) for the spans of requests with a
            header `traceparent`, see `trieton.serving.tracing`.
        log_path: file for the server's output, kept; None keeps it only while the server lives.
        extra_args: further command-line options of the server, each `--name=value`.

    Raises:
        ValueError: an option of `extra_args` is none, or is set here already.
        InstallationError: see `trieton_builder.server.installation`.
        PortTakenError: a port of `ports` is in use.
        ServerError: wrong repository, or the server died or was not ready in time.
    """

    def __init__(
        self,
        repository: str | os.PathLike[str],
        *,
        model_control: str = "explicit",
        load: Sequence[str] = (MODEL_NAME,),
        ports: tuple[int | None, int | None, int | None] = (None, None, None),
        address: str | None = None,
        control_key: str | None = None,
        strict_readiness: bool = False,
        exit_timeout: int = 10,
        start_timeout: float = 120.0,
        poll_seconds: int = 1,
        niceness: int = 0,
        trace_endpoint: str | None = None,
        env: Mapping[str, str] | None = None,
        log_path: str | os.PathLike[str] | None = None,
        extra_args: Sequence[str] = (),
    ):
        if model_control not in ("explicit", "poll", "none"):
            raise ValueError(f"model_control: expected explicit, poll or none, got {model_control!r}")
        self.repository = Path(repository).absolute()
        self.model_control = model_control
        self.load = tuple(load) if model_control == "explicit" else ()
        self.address = loopback() if address is None else address
        self.control_key = secrets.token_hex(16) if control_key is None else control_key
        self.exit_timeout = exit_timeout
        self._wanted_ports = ports
        self._strict_readiness = strict_readiness
        self._start_timeout = start_timeout
        self._poll_seconds = poll_seconds
        self._niceness = niceness
        self._trace_endpoint = trace_endpoint
        self._env = dict(env or {})
        self._wanted_log = None if log_path is None else Path(log_path).absolute()
        self._extra_args = tuple(extra_args)
        self._id = f"trieton-{os.getpid()}-{secrets.token_hex(4)}"
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._backend_folders: set[Path] = set()
        self._ports = (0, 0, 0)
        self._exit_code: int | None = None
        check_extra_args(extra_args, self._arguments(Path()))

    # What others use

    @property
    def http_url(self) -> str:
        """host:port of the HTTP endpoint."""
        return f"{self._url_host}:{self._ports[0]}"

    @property
    def grpc_url(self) -> str:
        """host:port of the gRPC endpoint."""
        return f"{self._url_host}:{self._ports[1]}"

    @property
    def metrics_url(self) -> str:
        """URL of the Prometheus metrics."""
        return f"http://{self._url_host}:{self._ports[2]}/metrics"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._process is None:
            raise ServerError("the server is not running")
        return self._process.pid

    @property
    def log_path(self) -> Path:
        """File of the server's output."""
        if self._wanted_log is not None:
            return self._wanted_log
        if self._folder is None:
            raise ServerError("the server is not running and was given no log_path to keep")
        return self._folder / "server.log"

    @property
    def shm_prefix(self) -> str:
        """What the names of this server's regions in /dev/shm begin with, so that servers never share or mix them."""
        return f"{self._id}-"

    def poll(self) -> int | None:
        """Exit code if the process has ended by itself, else None."""
        return self._exit_code if self._process is None else self._process.poll()

    def processes(self) -> list[psutil.Process]:
        """The server's process and the stubs below it (one per model instance)."""
        server = psutil.Process(self.pid)
        return [server, *server.children(recursive=True)]

    def log_tail(self, lines: int = 15) -> str:
        """The last lines of the log, errors preferred when there are any."""
        try:
            text = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        errors = [line for line in text if line.startswith("E") or "error" in line.lower()]
        return "\n".join((errors or text)[-lines:])

    # Life

    def start(self) -> "TritonServer":
        """Start and wait until every model of `load` is ready."""
        if self._process is not None:
            raise ServerError(f"the server is already running with process id {self.pid}")
        check_repository(self.repository, self.load)
        check_numpy()
        installation = find_installation()
        leftovers.sweep()
        for tries_left in reversed(range(PORT_TRIES)):
            try:
                self._start_once(installation)
                return self
            except PortTakenError:
                # Another process took a port between our look and the server's bind; only ours may be chosen anew.
                self.stop()
                if None not in self._wanted_ports or tries_left == 0:
                    raise
            except BaseException:
                self.stop()
                raise
        raise AssertionError("unreachable: the last try returns or raises")

    def stop(self) -> int:
        """End the server: SIGTERM, bounded wait, SIGKILL; remove what it left in /dev/shm. Returns its exit code.

        Ctrl-C or SIGTERM meanwhile ends the wait, not the removal, and is raised afterwards.
        """
        with interrupts.held_back() as held:
            return self._stop(held)

    def _stop(self, held: interrupts.Held) -> int:
        process, self._process = self._process, None
        if process is not None:
            stubs = []
            with contextlib.suppress(psutil.Error):
                stubs = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + self.exit_timeout + 10
            while process.poll() is None:
                if held.came or time.monotonic() > deadline:
                    process.kill()
                    process.wait()
                time.sleep(0.01)
            for stub in stubs:  # psutil compares start times, so a reused process id is safe
                with contextlib.suppress(psutil.Error):
                    stub.kill()
            self._exit_code = process.returncode
        self._remove_leftovers()
        return -1 if self._exit_code is None else self._exit_code

    def kill(self) -> None:
        """End a server nobody needs any more at once; `stop` would take seconds."""
        with interrupts.held_back() as held:
            if self._process is not None:
                with contextlib.suppress(psutil.Error):  # it has ended by itself
                    for process in reversed(self.processes()):
                        with contextlib.suppress(psutil.Error):
                            process.kill()
                self._process.wait()
            self._stop(held)

    def __enter__(self) -> "TritonServer":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # How it starts

    @property
    def _host(self) -> str:
        """Where this machine itself reaches the server."""
        return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(self.address, self.address)

    @property
    def _url_host(self) -> str:
        return f"[{self._host}]" if ":" in self._host else self._host

    def _start_once(self, installation: Installation) -> None:
        self._exit_code = None
        # For an interrupt between two lines of who would have stopped it. Only here: a forked process ends too.
        self._starter = os.getpid()
        atexit.register(self._stop_at_exit)
        temporary = tempfile.gettempdir()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{self._id}-", dir="/tmp" if has_space(temporary) else temporary))
        leftovers.mark(self._folder)
        self._ports = choose_ports(self._wanted_ports, self.address)
        link_backend(installation, self._folder)
        arguments = [f"--model-repository={self._plain_repository()}", *self._arguments(self._folder / "backends")]
        command = [str(installation.binary), *arguments, *self._extra_args]
        there = leftovers.environments()
        with open(self.log_path, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", launcher.__file__, str(os.getpid()), str(self._niceness), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment(installation),
                cwd=self._folder,  # the stub has its working directory first on sys.path: nothing of the user's there
                start_new_session=True,  # Ctrl-C reaches the starter alone, which then stops the server in order
            )
        self._wait_ready()
        self._backend_folders = leftovers.environments() - there

    def _arguments(self, backends: Path) -> list[str]:
        """The command line without the program, the repository and `extra_args`."""
        http_port, grpc_port, metrics_port = self._ports
        control = f"{KEY_HEADER}={self.control_key}"
        # Triton 2.51 writes IPv6 in two ways; `::1` alone it takes for a port in use, or for every address.
        over_http, over_grpc = (
            (f"ipv6:{self.address}", f"[{self.address}]") if ":" in self.address else [self.address] * 2
        )
        arguments = [
            f"--id={self._id}",
            f"--model-control-mode={self.model_control}",
            f"--backend-directory={backends}",
            f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}",
            f"--backend-config=python,shm-default-byte-size={SHM_BYTES}",
            f"--http-address={over_http}",
            f"--http-port={http_port}",
            f"--grpc-address={over_grpc}",
            f"--grpc-port={grpc_port}",
            f"--metrics-address={over_http}",
            f"--metrics-port={metrics_port}",
            f"--http-restricted-api={RESTRICTED}:{control}",
            f"--grpc-restricted-protocol={RESTRICTED}:{control}",
            # Our configuration is complete; to guess at it the server would start every model twice (1 s or more).
            "--disable-auto-complete-config",
            # Quantiles of the time in the queue and in the model, for the dashboard; off by default.
            "--metrics-config=summary_latencies=true",
            f"--strict-readiness={str(self._strict_readiness).lower()}",
            f"--exit-timeout-secs={self.exit_timeout}",
            # Clients ask every 10 s whether we are there while they wait. By default the server ends connections that
            # ask more often than every 5 minutes (too_many_pings), after three minutes of one long load (seen).
            f"--grpc-http2-min-recv-ping-interval-without-data={PING_MS}",
        ]
        if self._trace_endpoint is not None:
            # Not the server's own tracing (--trace-config mode=opentelemetry): with a collector that accepts and never
            # answers it does not end on SIGTERM within 20 s (seen).
            arguments += [f"--{kind}-header-forward-pattern={TRACE_HEADERS}" for kind in ("http", "grpc")]
        if self.model_control == "poll":
            arguments.append(f"--repository-poll-secs={self._poll_seconds}")
        return [*arguments, *(f"--load-model={name}" for name in self.load)]

    def _environment(self, installation: Installation) -> dict[str, str]:
        """The stub is a Python of its own that ignores every PYTHON* variable (it is isolated, seen).

        It takes its environment from the `python3` that comes first on PATH: with this one's folder there, it has the
        packages of this virtual environment, editable installs included.
        """
        assert self._folder is not None
        environment = dict(os.environ)
        _prepend(environment, "PATH", str(Path(sys.executable).parent))
        if installation.libpython.is_absolute():
            library = self._folder / "lib"  # a folder with this one library shadows nothing else
            library.mkdir()
            (library / installation.libpython.name).symlink_to(installation.libpython)
            _prepend(environment, "LD_LIBRARY_PATH", str(library))
        if self._trace_endpoint is not None:
            environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = self._trace_endpoint
        return {**environment, **self._env}

    def _plain_repository(self) -> Path:
        """The repository, behind a link where its path has a space: the stub splits its own command line at spaces."""
        if not has_space(self.repository):
            return self.repository
        assert self._folder is not None
        link = self._folder / "repository"
        link.symlink_to(self.repository)
        return link

    def _wait_ready(self) -> None:
        """Wait until the server answers under our own id (not another one on that port) and all models are ready."""
        assert self._process is not None
        deadline = time.monotonic() + self._start_timeout
        paths = ["/v2/health/ready", *(f"/v2/models/{name}/ready" for name in self.load)]
        while True:
            code = self._process.poll()
            if code is not None:
                raise self._died(code)
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._id.encode() in self._get("/v2")[1] and all(self._get(path)[0] == 200 for path in paths):
                    return
            if time.monotonic() > deadline:
                raise ServerError(
                    f"the server was not ready after {self._start_timeout:g} s; its log ends with:\n{self.log_tail()}"
                )
            time.sleep(0.03)

    def _get(self, path: str) -> tuple[int, bytes]:
        # One connection per request, closed at once: an idle one would hold the shutdown for its whole timeout.
        connection = http.client.HTTPConnection(self._host, self._ports[0], timeout=5)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _died(self, code: int) -> ServerError:
        tail = self.log_tail()
        if "already in use" in tail.lower():
            return PortTakenError(f"a port of {self._ports} is in use:\n{tail}")
        if not tail or code in (126, 127) or "error while loading shared libraries" in tail:
            return ServerError(
                f"the server's program does not run (exit code {code}): {tail or 'no output'}; {REINSTALL}"
            )
        log = self.log_path.read_text(errors="replace")
        if refused := refused_option(log):
            return ServerError(f"the server refuses an option: {refused}")
        reason = load_failure(log)
        if reason is not None:
            return ServerError(f"{self.repository}: {reason}")
        return ServerError(f"the server ended with exit code {code} while starting; its log ends with:\n{tail}")

    def _stop_at_exit(self) -> None:
        if os.getpid() == self._starter:
            self.stop()

    def _remove_leftovers(self) -> None:
        atexit.unregister(self._stop_at_exit)
        leftovers.remove_regions(self.shm_prefix)
        if len(self._backend_folders) == 1:  # else a server that started meanwhile owns one of them
            with contextlib.suppress(OSError):  # gone, as it should be, or not empty
                self._backend_folders.pop().rmdir()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _prepend(environment: dict[str, str], name: str, value: str) -> None:
    environment[name] = ":".join([value, *filter(None, [environment.get(name)])])
