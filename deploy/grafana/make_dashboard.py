"""Makes the Grafana dashboard from a list of panels: `python deploy/grafana/make_dashboard.py`.

The queries name metrics that the running server exports; tests/test_deploy_dashboard.py asks a real server about each.
The result, dashboards/trieton.json, is committed because docker-compose.yml mounts it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent / "dashboards" / "trieton.json"
DATASOURCE = {"type": "prometheus", "uid": "trieton-prometheus"}
COLUMNS = 24  # of Grafana's grid

# Chosen in the dashboard: which servers, which model (an ensemble counts its own requests).
OURS = 'instance=~"$instance", model="$model"'
SERVER = 'instance=~"$instance"'
WINDOW = "$__rate_interval"


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title, about: what it shows, and how to read it.
        queries: (PromQL, legend) pairs; `{{label}}` in a legend stands for the label's value.
        unit: Grafana's name of the unit.
        kind: "timeseries" or "stat" (the last value, large).
        width, height: in cells of the grid.
        maximum: upper end of the axis, where there is a natural one.
        text: of a stat, what stands there: the "value", or the "name" of the series.
        stacked: series add up to a whole.
    """

    title: str
    about: str
    queries: tuple[tuple[str, str], ...]
    unit: str
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    maximum: float | None = None
    stacked: bool = False
    text: str = "value"


def rate(metric: str, labels: str = OURS, by: str = "") -> str:
    """Growth per second of a counter, summed over servers and, except `by`, over labels."""
    return f"sum {f'by ({by}) ' if by else ''}(rate({metric}{{{labels}}}[{WINDOW}]))"


def ratio(part: str, whole: str) -> str:
    """A share; nothing (not 0, not NaN) while there is no traffic."""
    return f"{part} / ({whole} > 0)"


def share(metric: str) -> str:
    """Share of the answered searches that a counter counts."""
    return ratio(rate(metric), rate("trieton_searches_total", OURS + ', outcome="ok"'))


def per_request_ms(metric: str) -> str:
    """Mean milliseconds per request of a counter of the server that sums microseconds."""
    return f"{ratio(rate(metric), rate('nv_inference_request_success'))} / 1000"


def quantile(value: str) -> str:
    """A quantile of whole requests in milliseconds, of the worst server: quantiles must not be averaged."""
    return f'max(nv_inference_request_summary_us{{{OURS}, quantile="{value}"}}) / 1000'


def loaded(metric: str, by: str = "instance") -> str:
    """A gauge of the loaded versions, the largest per server; those of unloaded versions are 0."""
    return f"max by ({by}) ({metric}{{{OURS}}} > 0)"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Now",
        (
            Panel(
                "Searches per second",
                "Answered, all servers.",
                ((rate("trieton_searches_total", OURS + ', outcome="ok"'), ""),),
                "reqps", "stat", 4, 4,
            ),
            Panel(
                "Request time, p99",
                "Worst server, queue included.",
                ((quantile("0.99"), ""),),
                "ms", "stat", 4, 4,
            ),
            Panel(
                "Failed",
                "Share of searches that went wrong in the model, which the server does not count; and of requests that "
                "the server itself refused or lost.",
                (
                    (ratio(rate("trieton_searches_total", OURS + ', outcome="failed"'), rate("trieton_searches_total")),
                     "searches"),
                    (ratio(rate("nv_inference_request_failure"),
                           f"{rate('nv_inference_request_failure')} + {rate('nv_inference_request_success')}"),
                     "server"),
                ),
                "percentunit", "stat", 4, 4,
            ),
            Panel("Version that answers", "The one with the most searches now.",
                  ((f"topk(1, {rate('trieton_searches_total', by='version')} > 0)", "{{version}}"),),
                  "none", "stat", 4, 4, text="name"),
            Panel(
                "Bundles",
                "Id of every bundle that is loaded, and its version. Two: the version before is kept.",
                ((f"max by (version, bundle_id) (trieton_bundle_info{{{OURS}}}) == 1", "{{version}}: {{bundle_id}}"),),
                "none", "stat", 4, 4, text="name",
            ),
            Panel("Index age", "Time since the newest loaded version became ready.",
                  ((f"time() - {loaded('trieton_ready_time_seconds')}", "{{instance}}"),), "s", "stat", 4, 4),
        ),
    ),
    (
        "Traffic",
        (
            Panel(
                "Searches by outcome",
                "invalid: refused with a reason. cancelled: the caller's deadline had passed. failed: ours.",
                ((rate("trieton_searches_total", by="outcome"), "{{outcome}}"),),
                "reqps", stacked=True,
            ),
            Panel(
                "Requests that the server did not answer",
                "REJECTED: the queue was full or the request waited too long. BACKEND: the model's process is dead. "
                "CANCELED: the caller left. OTHER: malformed. Errors that the model tells are not in it, see beside.",
                ((rate("nv_inference_request_failure", by="reason"), "{{reason}}"),),
                "reqps", stacked=True,
            ),
            Panel("Waiting in the queue", "Requests, at the moment of the scrape.",
                  ((f"sum by (instance) (nv_inference_pending_request_count{{{OURS}}})", "{{instance}}"),), "none"),
        ),
    ),
    (
        "Latency",
        (
            Panel(
                "Request time",
                "Quantiles of the last minutes as the server sees them; the worst server.",
                tuple((quantile(f"0.{digits}"), f"p{digits:0<2}") for digits in ("5", "9", "95", "99")),
                "ms",
            ),
            Panel(
                "Where a request spends it",
                "Mean per request. Queue grows first when a server is too small. Compute covers the whole batch.",
                (
                    (per_request_ms("nv_inference_queue_duration_us"), "queue"),
                    (per_request_ms("nv_inference_compute_input_duration_us"), "input"),
                    (per_request_ms("nv_inference_compute_infer_duration_us"), "compute"),
                    (per_request_ms("nv_inference_compute_output_duration_us"), "output"),
                ),
                "ms", stacked=True,
            ),
            Panel(
                "Where a batch spends it",
                "Seconds of work per batch, by stage of the search.",
                ((f"sum by (stage) (rate(trieton_stage_seconds_total{{{OURS}}}[{WINDOW}])) "
                  f"/ on () group_left () ({rate('trieton_executions_total')} > 0)", "{{stage}}"),),
                "s", stacked=True,
            ),
        ),
    ),
    (
        "Search",
        (
            Panel(
                "Batch size",
                "Mean number of queries that the server put together, and that one beam search took.",
                (
                    (ratio(rate("trieton_batched_queries_total"), rate("trieton_executions_total")),
                     "queries per execution"),
                    (ratio(rate("trieton_batched_queries_total"), rate("trieton_batches_total")),
                     "queries per beam search"),
                ),
                "none", width=6,
            ),
            Panel(
                "Short and certified results",
                "Short: fewer items than asked for (a tight constraint, or a narrow beam). Certified: proven to be the "
                "true top of everything allowed.",
                ((share("trieton_short_results_total"), "short"),
                 (share("trieton_certified_results_total"), "certified")),
                "percentunit", maximum=1, width=6,
            ),
            Panel(
                "Items",
                "Per search. Unknown: ids that the catalogue lacks; they grow when it lags behind.",
                ((share("trieton_results_total"), "returned"),
                 (share("trieton_unknown_items_total"), "unknown in the history"),
                 (share("trieton_unknown_listed_items_total"), "unknown in lists")),
                "none", width=6,
            ),
            Panel(
                "Candidates ranked",
                "Per search: allowed children that better ones had not ruled out. Few under a tight constraint, "
                "none on a GPU, whose kernel does not count.",
                ((share("trieton_candidates_total"), "candidates"),),
                "none", width=6,
            ),
        ),
    ),
    (
        "Constraints",
        (
            Panel(
                "Compiled constraints found",
                "Share of constraints that were in the plane cache.",
                ((ratio(rate("trieton_plane_cache_hits_total"),
                        f"{rate('trieton_plane_cache_hits_total')} + {rate('trieton_plane_cache_misses_total')}"),
                  "hits"),),
                "percentunit", maximum=1,
            ),
            Panel(
                "Compile time",
                "Per constraint that had to be compiled, and how many compiled ones were dropped for space.",
                (
                    (ratio(rate("trieton_compile_seconds_total"), rate("trieton_plane_cache_misses_total")),
                     "per constraint"),
                ),
                "s",
            ),
            Panel(
                "Plane cache",
                "Bytes held, and evictions per second: more than a few mean that the cache is too small.",
                (
                    (f"sum by (instance) (trieton_plane_cache_bytes{{{OURS}}})", "{{instance}}"),
                ),
                "bytes", width=4,
            ),
            Panel("Evictions", "Compiled constraints dropped for space, per second.",
                  ((rate("trieton_plane_cache_evictions_total"), "evictions"),), "cps", width=4),
        ),
    ),
    (
        "Versions and memory",
        (
            Panel(
                "Answers by version",
                "A rollout is a change of colour. Two for longer than a moment: servers differ, or callers pin one.",
                ((rate("trieton_searches_total", OURS + ', outcome="ok"', by="version"), "version {{version}}"),),
                "reqps", stacked=True,
            ),
            Panel(
                "Index",
                "Items and distinct semantic IDs of the loaded versions.",
                ((loaded("trieton_index_items", "version"), "items of {{version}}"),
                 (loaded("trieton_index_leaves", "version"), "semantic IDs of {{version}}")),
                "short",
            ),
            Panel(
                "Memory",
                "Of the machine, of the index (mapped, shared by all instances), and pinned for transfers.",
                (
                    (f"max by (instance) (nv_cpu_memory_used_bytes{{{SERVER}}})", "machine {{instance}}"),
                    (loaded("trieton_index_bytes"), "index {{instance}}"),
                    (f"max by (instance) (nv_pinned_memory_pool_used_bytes{{{SERVER}}})", "pinned {{instance}}"),
                ),
                "bytes",
            ),
        ),
    ),
)  # fmt: skip


def make_dashboard() -> dict[str, Any]:
    """The dashboard as Grafana's JSON model (schema version 39, Grafana 10 and newer)."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        panels.append(
            {
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": top},
            }
        )
        left = 0
        for panel in row:
            place = {"h": panel.height, "w": panel.width, "x": left, "y": top + 1}
            panels.append(_panel(panel, place))
            left += panel.width
        if left != COLUMNS:
            raise ValueError(f"row {title!r}: expected panels {COLUMNS} cells wide, got {left}")
        top += 1 + max(panel.height for panel in row)
    for number, made in enumerate(panels, 1):
        made["id"] = number
    return {
        "uid": "trieton",
        "title": "Trieton",
        "tags": ["trieton"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "templating": {
            "list": [
                _variable("instance", "label_values(nv_inference_request_success, instance)", many=True),
                _variable("model", "label_values(trieton_searches_total, model)", many=False),
            ]
        },
        "annotations": {
            "list": [
                {
                    "name": "New version",
                    "datasource": DATASOURCE,
                    "enable": True,
                    "iconColor": "purple",
                    # The newest loaded version is another one: after a rollback, too.
                    "expr": f"changes(({loaded('trieton_ready_time_seconds')})[{WINDOW}:]) > 0",
                    "titleFormat": "New version on {{instance}}",
                }
            ]
        },
        "panels": panels,
    }


def expressions(dashboard: dict[str, Any]) -> list[str]:
    """Every PromQL expression of a dashboard, with Grafana's variables filled in."""
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    return [filled(expression) for expression in found + [each["expr"] for each in dashboard["annotations"]["list"]]]


def filled(expression: str, window: str = "1m") -> str:
    """An expression with Grafana's variables filled in, as Grafana would for all servers."""
    for name, value in {WINDOW: window, "$instance": ".*", "$model": "generative_retriever"}.items():
        expression = expression.replace(name, value)
    return expression


def _panel(panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    made: dict[str, Any] = {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "gridPos": place,
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": DATASOURCE,
                "expr": expr,
                "legendFormat": legend or "__auto",
            }
            for number, (expr, legend) in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": defaults, "overrides": []},
    }
    if panel.kind == "stat":
        made["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "none", "graphMode": "none"}
        made["options"]["textMode"] = panel.text
    else:
        defaults["custom"] = {
            "fillOpacity": 25 if panel.stacked else 0,
            "lineWidth": 1,
            "stacking": {"mode": "normal" if panel.stacked else "none"},
        }
        made["options"] = {"tooltip": {"mode": "multi", "sort": "desc"}, "legend": {"displayMode": "list"}}
    return made


def _variable(name: str, query: str, *, many: bool) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,  # when the time range changes: servers come and go
        "sort": 1,
        "multi": many,
        "includeAll": many,
        "allValue": ".*" if many else None,
        "current": {"text": "All", "value": "$__all"} if many else {},
    }


def main() -> None:
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(make_dashboard(), indent=1) + "\n")
    print(f"{OUT}: {sum(p['type'] != 'row' for p in make_dashboard()['panels'])} panels")


if __name__ == "__main__":
    main()
