"""Figures of one run, the thresholds they are held to, and the summary that is left beside Locust's own reports."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing Locust patches the whole process
    from locust.env import Environment


@dataclass
class Steps:
    """Throughput and response times at each number of users, for the scenario that ramps up.

    Of one process: with several workers each sees its own share of the users only, and the table stays empty.
    """

    seen: dict[int, list[float]] = field(default_factory=dict)
    begun: dict[int, tuple[float, float]] = field(default_factory=dict)

    def add(self, users: int, now: float, milliseconds: float) -> None:
        """One answer while `users` were active."""
        self.seen.setdefault(users, []).append(milliseconds)
        first, _ = self.begun.get(users, (now, now))
        self.begun[users] = (first, now)

    def table(self) -> list[dict[str, float]]:
        """Per number of users: requests per second, and 50th and 99th percentile in milliseconds."""
        rows = []
        for users, times in sorted(self.seen.items()):
            first, last = self.begun[users]
            if last - first < 0.5:  # a passing count while users were being started
                continue
            ordered = sorted(times)
            rows.append(
                {
                    "users": users,
                    "requests_per_second": round(len(times) / (last - first), 1),
                    "p50_ms": round(ordered[len(ordered) // 2], 1),
                    "p99_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 1),
                }
            )
        return rows


def summarise(environment: "Environment", counts: Counter[str], bundles: Counter[str], steps: Steps) -> dict[str, Any]:
    """Everything that the thresholds look at and that a person wants to keep."""
    options, stats = environment.parsed_options, environment.stats
    assert options is not None
    total = stats.total
    return {
        "scenario": options.scenario,
        "users": options.num_users,
        "seed": options.seed,
        "requests": total.num_requests,
        "failures": total.num_failures,
        "wrong_answers": counts["wrong"],
        "requests_per_second": round(total.total_rps, 1),
        "p50_ms": total.get_response_time_percentile(0.5),
        "p95_ms": total.get_response_time_percentile(0.95),
        "p99_ms": total.get_response_time_percentile(0.99),
        "answers": counts["answers"],
        "short_answers": counts["short"],
        "certified_answers": counts["certified"],
        "bundles": dict(sorted(bundles.items())),
        "errors": {
            f"{error.method} {error.name}: {error.parse_error(error.error)}": error.occurrences
            for error in stats.errors.values()
        },
        "steps": steps.table() if options.scenario == "ramp" else [],
    }


def judge(summary: dict[str, Any], options: Any) -> list[str]:
    """What fails a threshold, in words; empty when the run passed."""
    problems = []
    requests = summary["requests"]
    if requests < options.min_requests:
        problems.append(f"{requests} requests, expected at least {options.min_requests}")
    if requests and summary["failures"] / requests > options.max_fail_ratio:
        problems.append(
            f"{summary['failures']} of {requests} requests failed, allowed share {options.max_fail_ratio:g}: "
            + "; ".join(f"{error} ({count} times)" for error, count in list(summary["errors"].items())[:3])
        )
    if summary["wrong_answers"]:
        problems.append(f"{summary['wrong_answers']} wrong answers, expected none")
    if summary["p99_ms"] is not None and summary["p99_ms"] > options.max_p99_ms:
        problems.append(f"99th percentile {summary['p99_ms']:.0f} ms, expected at most {options.max_p99_ms:.0f} ms")
    bundles = len(summary["bundles"])
    if options.scenario == "rollout":
        if bundles < 2:
            problems.append(f"{bundles} bundles answered during the rollout, expected at least 2")
    elif bundles > 1:
        problems.append(f"{bundles} bundles answered although nothing was published: {', '.join(summary['bundles'])}")
    return problems


def write(summary: dict[str, Any], problems: list[str], folder: Path) -> None:
    """`summary.json` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps({**summary, "problems": problems}, indent=1) + "\n")
