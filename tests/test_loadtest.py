"""The load test itself: its traffic, its judgement of answers, and a short run against the real server."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from trieton.constraint.compile import compile_constraint
from trieton.index.catalog import Catalog
from trieton_builder.server.process import choose_ports
from trieton_client import Results

LOADTEST = Path(__file__).parents[1] / "loadtest"
OFFICE = Path(__file__).parents[2] / "shared" / "data" / "office"
sys.path.insert(0, str(LOADTEST))

from answers import AnswerChecker, Version, WrongAnswerError  # noqa: E402
from report import Steps, judge  # noqa: E402
from scenarios import SCENARIOS  # noqa: E402
from traffic import LONG_LIST, Constraint, Query, Traffic, load_histories, make_constraints  # noqa: E402

HISTORIES = [list(range(1000, 1000 + length)) for length in range(1, 40)]
NAMES = ("even", "rare", "third")


def stream(traffic: Traffic, number: int, worker: int = 0) -> list[Query]:
    user = traffic.user(number, worker)
    return [next(user) for _ in range(200)]


# Traffic


def test_the_same_seed_gives_the_same_requests_and_users_differ():
    first, second = (Traffic(HISTORIES, NAMES, seed=3) for _ in range(2))
    assert stream(first, 0) == stream(second, 0)
    assert stream(first, 0) != stream(first, 1)
    assert stream(first, 0) != stream(first, 0, worker=1)
    assert stream(first, 0) != stream(Traffic(HISTORIES, NAMES, seed=4), 0)


def test_people_are_zipf_distributed():
    traffic = Traffic(HISTORIES, (), seed=0)
    asked = Counter(len(query.history) for number in range(20) for query in stream(traffic, number))
    counts = [count for _, count in asked.most_common()]
    assert counts[0] / sum(counts) == pytest.approx(traffic._popularity[0], rel=0.15)
    assert counts[0] / counts[9] == pytest.approx(10**1.1, rel=0.5)
    assert len(asked) > 30, "the tail is there too"


def test_requests_mix_constraints_widths_and_exclude_lists():
    queries = [query for number in range(10) for query in stream(Traffic(HISTORIES, NAMES, seed=0), number)]
    assert {query.num_results for query in queries} == {5, 10, 20, 50}
    assert {query.beam_width for query in queries} == {None, 40, 50, 80}
    assert 0.55 < np.mean([query.constraint is not None for query in queries]) < 0.65
    assert 0.45 < np.mean([bool(query.exclude) for query in queries]) < 0.6
    assert any(len(query.exclude) >= LONG_LIST for query in queries)
    assert all(query.beam_width is None or query.beam_width >= query.num_results for query in queries)


def test_a_constraint_means_to_the_server_what_it_means_to_the_check(tiny_bundle):
    version = Version.open(tiny_bundle)
    from trieton.bundle import Bundle

    index = Bundle.open(tiny_bundle).index
    everything = np.arange(index.num_items)
    constraints = make_constraints(sorted(version.sets), np.random.default_rng(0))
    assert len(constraints) == 40
    for constraint in constraints:
        plane = compile_constraint(index, constraint.text())
        np.testing.assert_array_equal(plane.allows(everything), constraint.allowed(version.sets), constraint.text())


def test_histories_come_from_a_file_of_json_lines(tmp_path):
    (tmp_path / "h.jsonl").write_text('[1, 2, 3]\n["a", "b"]\n')
    assert load_histories(str(tmp_path / "h.jsonl")) == [[1, 2, 3], ["a", "b"]]
    (tmp_path / "h.jsonl").write_text('[1]\n{"a": 1}\n')
    with pytest.raises(ValueError, match="line 2: expected a list of item ids"):
        load_histories(str(tmp_path / "h.jsonl"))
    with pytest.raises(ValueError, match="expected movielens"):
        load_histories(str(tmp_path / "missing"))


def test_histories_of_movielens_are_those_of_its_people():
    histories = load_histories("movielens")
    assert len(histories) == 943
    assert 15 < np.median([len(history) for history in histories]) < 100


@pytest.mark.skipif(not OFFICE.is_dir(), reason=f"{OFFICE} is not there")
def test_histories_come_from_a_folder_of_purchase_sequences():
    histories = load_histories(str(OFFICE))
    assert len(histories) > 5000
    assert all(isinstance(item, int) for item in histories[0])


# Answers


@pytest.fixture
def checker(monkeypatch) -> AnswerChecker:
    """One bundle `b` of ten items 0..9, of which even ones are in `even` and 9 is outside the bundle's base."""
    ids = np.arange(10)
    base = ids != 9
    version = Version(Catalog(ids, ids, None), {"even": ids % 2 == 0}, base)
    made = AnswerChecker(Path("nowhere"), versions={"b": version})
    monkeypatch.setattr(made, "_scan", lambda: None)
    return made


EVEN = Constraint("set", ("even",))


def answer(*ids: int, scores: list[float] | None = None, bundle_id: str = "b") -> Results:
    values = [-1.0 - place for place in range(len(ids))] if scores is None else scores
    codes = np.zeros((len(ids), 3), np.int32)
    return Results(np.array(ids), np.array(values, np.float32), codes, len(ids), 0, True, bundle_id, "1")


def query(num_results: int = 3, constraint: Constraint | None = None, exclude: tuple[int, ...] = ()) -> Query:
    return Query([1], num_results, None, constraint, list(exclude))


@pytest.mark.parametrize(
    ("asked", "given", "said"),
    [
        (query(), answer(1, 2, 3, 4), "asked for"),
        (query(), answer(1, 1), "twice"),
        (query(), answer(1, 2, scores=[-2, -1]), "descending"),
        (query(), answer(1, scores=[float("nan")]), "descending"),
        (query(), answer(1, scores=[0.5]), "descending"),
        (query(exclude=(2,)), answer(1, 2), "excluded"),
        (query(), answer(1, 77), "its bundle does not have"),
        (query(), answer(1, bundle_id="other"), "repository does not have"),
        (query(constraint=EVEN), answer(2, 3), "does not allow"),
        (query(), answer(9), "does not allow"),
    ],
)
def test_a_wrong_answer_is_found(checker, asked, given, said):
    with pytest.raises(WrongAnswerError, match=said):
        checker.check(asked, given)
    assert checker.counts == {"wrong": 1}


def test_right_answers_are_counted_with_their_bundle(checker):
    checker.check(query(constraint=EVEN), answer(2, 4, 6))
    checker.check(query(), answer(1))
    assert checker.counts == {"answers": 2, "short": 1, "certified": 2}
    assert checker.bundles == {"b": 2}


# Scenarios and thresholds


def test_every_scenario_stays_within_its_peak_and_reaches_it():
    for name, scenario in SCENARIOS.items():
        shares = [scenario.users(moment / 100) for moment in range(100)]
        assert max(shares) == 1.0, name
        assert min(shares) > 0, name
    ramp = [SCENARIOS["ramp"].users(moment / 100) for moment in range(100)]
    assert ramp == sorted(ramp)


def test_the_table_of_steps_names_the_throughput_of_each_number_of_users():
    steps = Steps()
    for users, gap in ((2, 0.1), (4, 0.05)):
        for place in range(100):
            steps.add(users, place * gap, milliseconds=place)
    steps.add(3, 0.0, 5)  # only passing by while users were started
    two, four = steps.table()
    assert (two["users"], four["users"]) == (2, 4)
    assert two["requests_per_second"] == pytest.approx(10, rel=0.02)
    assert four["requests_per_second"] == pytest.approx(20, rel=0.02)
    assert (four["p50_ms"], four["p99_ms"]) == (50, 99)


GOOD = {"requests": 100, "failures": 0, "wrong_answers": 0, "p99_ms": 20.0, "bundles": {"a": 100}, "errors": {}}


@pytest.mark.parametrize(
    ("change", "scenario", "said"),
    [
        ({}, "steady", None),
        ({"requests": 0}, "steady", "0 requests"),
        ({"failures": 1, "errors": {"x": 1}}, "steady", "1 of 100 requests failed"),
        ({"wrong_answers": 1}, "steady", "1 wrong answers"),
        ({"p99_ms": 5000.0}, "steady", "99th percentile"),
        ({"bundles": {"a": 50, "b": 50}}, "steady", "2 bundles answered although nothing was published"),
        ({"bundles": {"a": 50, "b": 50}}, "rollout", None),
        ({}, "rollout", "1 bundles answered during the rollout"),
    ],
)
def test_thresholds_decide(change, scenario, said):
    options = SimpleNamespace(scenario=scenario, min_requests=1, max_fail_ratio=0.0, max_p99_ms=1000.0)
    problems = judge(GOOD | change, options)
    assert (problems == []) if said is None else any(said in problem for problem in problems)


# Against the real server


def overlap(*arguments: str) -> float:
    command = [sys.executable, LOADTEST / "overlap.py", *arguments]
    return float(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


def test_grpc_calls_overlap_under_gevent_and_the_self_check_can_tell():
    assert overlap() <= 0.6
    assert overlap("--without-init") > 1.5


@pytest.fixture(scope="module")
def bundles(make_tiny_bundle) -> tuple[Path, Path]:
    return make_tiny_bundle(seed=5), make_tiny_bundle(seed=5, base_constraint="even")


@pytest.fixture(scope="module")
def histories(tmp_path_factory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("histories") / "histories.jsonl"
    path.write_text("".join(f"{history}\n" for history in HISTORIES))
    return path


def run(report: Path, histories: Path, bundles: tuple[Path, ...], *options: str) -> tuple[int, dict, str]:
    command = [sys.executable, LOADTEST / "run.py", f"--report={report}", f"--histories={histories}", *options]
    command += [f"--bundle={bundle}" for bundle in bundles]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (report / "summary.json").is_file(), done.stdout + done.stderr
    return done.returncode, json.loads((report / "summary.json").read_text()), done.stdout + done.stderr


@pytest.mark.server
def test_a_rollout_under_load_fails_no_request_and_leaves_a_report(bundles, histories, tmp_path):
    options = ("--scenario=rollout", "--seconds=7", "--swaps=3", "--users=6", "--workers=2", "--max-p99-ms=30000")
    code, summary, said = run(tmp_path, histories, bundles, *options)
    assert code == 0, said
    assert summary["problems"] == []
    assert summary["failures"] == summary["wrong_answers"] == 0
    assert summary["requests"] == summary["answers"] > 50
    assert len(summary["bundles"]) == 2
    assert sum(summary["bundles"].values()) == summary["answers"]
    assert "3 of 3 swaps done" in said
    for name in ("report.html", "stats_stats.csv", "stats_failures.csv", "server.log"):
        assert (tmp_path / name).is_file(), name
    assert {line.split(",")[0] for line in (tmp_path / "stats_stats.csv").read_text().splitlines()} >= {"gRPC", "HTTP"}


def test_a_run_whose_requests_fail_ends_with_exit_code_1_and_says_why(histories, tmp_path):
    nobody = f"127.0.0.1:{choose_ports((None, None, None))[0]}"
    options = ["--headless", "--users=2", "--run-time=1s", f"--histories={histories}", f"--report={tmp_path}"]
    command = [sys.executable, "-m", "locust", "-f", LOADTEST / "locustfile.py", *options]
    command += [f"--grpc-url={nobody}", f"--http-url={nobody}", "--think-time=0.2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["failures"] == summary["requests"] > 0
    assert "threshold:" in done.stdout
    assert any("UnavailableError" in error for error in summary["errors"])


def test_a_bundle_that_is_not_there_is_one_clear_line(tmp_path):
    command = [sys.executable, LOADTEST / "run.py", f"--bundle={tmp_path / 'no'}", f"--report={tmp_path / 'report'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "no such bundle" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "report").exists()
