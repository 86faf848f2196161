"""Locust users of the served model, over gRPC and HTTP, both through `trieton_client`.

    locust -f loadtest/locustfile.py --headless --scenario ramp --users 64 --run-time 2m \
        --grpc-url localhost:8001 --http-url localhost:8000 --repository model_repository --report loadtest/report

loadtest/run.py starts a server for it. On several machines: `--master` on one, `--worker --master-host` on the others,
all with the same options. Every answer is checked while the load runs; thresholds decide the exit code.
"""

import time
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import grpc.experimental.gevent
from answers import AnswerChecker
from locust import User, events, task
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner
from overlap import check_overlap
from report import Steps, judge, summarise, write
from scenarios import SCENARIOS
from shapes import ScenarioShape
from traffic import Traffic, load_histories
from trieton_client import Client

__all__ = ["GrpcRetrieverUser", "HttpRetrieverUser", "ScenarioShape"]


class Run:
    """What the users of this process share."""

    traffic: Traffic
    checker = AnswerChecker()
    steps = Steps()
    environment: Environment | None = None
    grpc_client: Client | None = None
    numbers = count()


class RetrieverUser(User):
    """Asks, looks at the answer, thinks, asks again."""

    abstract = True
    protocol: ClassVar[str]

    def on_start(self) -> None:
        worker = getattr(self.environment.runner, "worker_index", 0)
        self.queries = Run.traffic.user(next(Run.numbers), max(0, worker))
        self.options = self.environment.parsed_options
        self.client = self.connect()

    def wait_time(self) -> float:
        """Exponential, so that users do not fall into step."""
        think = self.options.think_time
        return float(self.queries.rng.exponential(think)) if think else 0.0

    def connect(self) -> Client:
        raise NotImplementedError

    @task
    def retrieve(self) -> None:
        query = next(self.queries)
        failure: Exception | None = None
        start = time.perf_counter()
        try:
            answer = self.client.retrieve(
                query.history,
                query.num_results,
                beam_width=query.beam_width,
                constraint=query.constraint.text() if query.constraint else None,
                exclude=query.exclude or None,
                timeout=self.options.timeout,
            )
        except Exception as error:
            failure = error
        elapsed = 1000 * (time.perf_counter() - start)
        if failure is None:
            try:
                Run.checker.check(query, answer)
            except Exception as error:
                failure = error
        self.environment.events.request.fire(
            request_type=self.protocol,
            name="constrained" if query.constraint else "unconstrained",
            response_time=elapsed,
            response_length=0 if failure else int(answer.item_ids.nbytes + answer.scores.nbytes + answer.codes.nbytes),
            exception=failure,
            context={},
        )


class GrpcRetrieverUser(RetrieverUser):
    """All users of a process share one connection, as threads of a service do; gRPC multiplexes it."""

    protocol = "gRPC"
    weight = 3

    def connect(self) -> Client:
        if Run.grpc_client is None:
            # No retries: a load test wants to see what a caller without them sees.
            Run.grpc_client = Client(self.options.grpc_url, "grpc", retries=0)
        return Run.grpc_client


class HttpRetrieverUser(RetrieverUser):
    """Each user has a keep-alive connection of its own."""

    protocol = "HTTP"
    weight = 1

    def connect(self) -> Client:
        return Client(self.options.http_url, "http", retries=0, pool_size=1)

    def on_stop(self) -> None:
        self.client.close()  # an idle connection would hold the server's shutdown for its whole exit timeout


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    """Options of ours; each may also come from the environment, for docker-compose.yml."""
    add = parser.add_argument_group("Trieton").add_argument
    scenarios = "; ".join(f"{name}: {scenario.about}" for name, scenario in SCENARIOS.items())
    add("--scenario", choices=list(SCENARIOS), default="steady", env_var="TRIETON_SCENARIO", help=scenarios)
    add("--grpc-url", default="localhost:8001", env_var="TRIETON_GRPC_URL", help="host:port")
    add("--http-url", default="localhost:8000", env_var="TRIETON_HTTP_URL", help="host:port")
    add("--repository", default="", env_var="TRIETON_REPOSITORY", help="model repository; without it no constraints are"
        " asked for and answers are checked for what they show by themselves only")  # fmt: skip
    add("--histories", default="movielens", env_var="TRIETON_HISTORIES", help="movielens, a folder with test.csv and"
        " valid.csv, or a file of JSON lines")  # fmt: skip
    add("--seed", type=int, default=0, env_var="TRIETON_SEED", help="of people, constraints and order")
    add(
        "--think-time", type=float, default=0.05, env_var="TRIETON_THINK_TIME", help="mean seconds between two requests"
    )
    add("--timeout", type=float, default=5.0, env_var="TRIETON_TIMEOUT", help="deadline of a request in seconds")
    add("--max-fail-ratio", type=float, default=0.0, env_var="TRIETON_MAX_FAIL_RATIO", help="threshold")
    add("--max-p99-ms", type=float, default=1000.0, env_var="TRIETON_MAX_P99_MS", help="threshold")
    add("--min-requests", type=int, default=1, env_var="TRIETON_MIN_REQUESTS", help="threshold")
    add("--until", default="", help="a file; the load goes on beyond its duration until it exists")
    add("--report", default="", env_var="TRIETON_REPORT", help="folder for summary.json")


@events.init.add_listener
def set_up(environment: Environment, runner: Any, **_: Any) -> None:
    """Per process, before the first user: gRPC made to yield, traffic and checker made."""
    Run.environment = environment
    if isinstance(runner, MasterRunner):
        return
    grpc.experimental.gevent.init_gevent()
    # Locust runs listeners inside a handler that only logs errors; a load test on sand must not begin.
    try:
        print(f"4 gRPC calls of 0.5 s overlap: {check_overlap():.2f} s together", flush=True)
        options = environment.parsed_options
        assert options is not None
        Run.checker = AnswerChecker(Path(options.repository) if options.repository else None)
        Run.traffic = Traffic(load_histories(options.histories), Run.checker.set_names(), seed=options.seed)
    except Exception as error:
        raise SystemExit(f"trieton: {error}") from error


@events.request.add_listener
def note_step(response_time: float, **_: Any) -> None:
    if Run.environment is not None and Run.environment.runner is not None:
        Run.steps.add(Run.environment.runner.user_count, time.monotonic(), response_time)


@events.report_to_master.add_listener
def send_counts(data: dict[str, Any], **_: Any) -> None:
    """A worker's counts since its last report."""
    data["trieton"] = (dict(Run.checker.counts), dict(Run.checker.bundles))
    Run.checker.counts.clear()
    Run.checker.bundles.clear()


@events.worker_report.add_listener
def add_counts(data: dict[str, Any], **_: Any) -> None:
    counts, bundles = data.get("trieton", ({}, {}))
    Run.checker.counts.update(counts)
    Run.checker.bundles.update(bundles)


@events.quitting.add_listener
def finish(environment: Environment, **_: Any) -> None:
    """Hold the run to its thresholds; the worker leaves that to the master."""
    if Run.grpc_client is not None:
        Run.grpc_client.close()
    if isinstance(environment.runner, WorkerRunner):
        return
    summary = summarise(environment, Run.checker.counts, Run.checker.bundles, Run.steps)
    problems = judge(summary, environment.parsed_options)
    options = environment.parsed_options
    assert options is not None
    if options.report:
        write(summary, problems, Path(options.report))
    for row in summary["steps"]:
        print(
            f"{row['users']:5.0f} users  {row['requests_per_second']:8.1f} requests/s  "
            f"p50 {row['p50_ms']:7.1f} ms  p99 {row['p99_ms']:7.1f} ms"
        )
    for problem in problems:
        print(f"threshold: {problem}")
    environment.process_exit_code = 1 if problems else 0
