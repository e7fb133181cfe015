"""What a run came to: summary.json and the five lines that are printed at its end.

A pure function of the run folder's event log and metrics, so that every figure can be computed again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from src.core.clock import duration
from src.core.events import Event, read_jsonl
from src.core.folders import write_whole
from src.core.stats import mean
from src.spot.cost import Ledger

Summary = dict[str, Any]


def summarise(events: Iterable[Event], metrics: Iterable[Mapping[str, Any]], *, ledger: Ledger) -> Summary:
    """The figures of a run. What the run did not measure is None.

    - `status`: what `run_ended` says; `unfinished` without one.
    - `eval_{reward,judge}_{start,end}`: first and last held-out evaluation.
    - `steps`: iterations that count; `repeated_iterations`: trained again because a crash had lost them.
    - `wall_s`: from the first start to the last event, without the time between a crash and the restart.
    - `usd`, `reserved_usd`, `spot_usd`, `{reserved,spot}_utilisation`, `lost_usd`, `gpu_s` and `lost_steps` (denoising
      steps that preemptions cost): see `src.spot.cost`; `ledger` must not have seen an event yet.
    - `usd_per_point`: for each hundredth of held-out reward that was gained.
    - `seeds_explored`: explored seeds that there was to choose from, each once.
    - `preemptions`: spot workers lost during the run, those apart that left by themselves; `lost_samples`: samples in
      flight that others had to go on with.
    - `rank_correlation`: mean over iterations; `variance_ratio`: reward variance of kept over random seeds.
    """
    log = list(events)
    rows = list(metrics)
    for event in log:
        ledger.add(event)
    cost = ledger.cost
    steps = int(max((row["step"] for row in rows if "train/reward" in row), default=0))
    trained = sum(event["kind"] == "phase" and event["name"] == "train" for event in log)
    explored = {event["iteration"]: len(event["results"]) for event in _of(log, "explored")}
    spot = {event["worker"] for event in _of(log, "worker_joined") if event["role"] == "spot"}
    losses = _preemptions(log, spot)
    summary: Summary = {
        "status": _status(log),
        **_ends("eval_reward", _values(rows, "eval/reward")),
        **_ends("eval_judge", _values(rows, "eval/judge")),
        "steps": steps,
        "repeated_iterations": max(0, trained - steps),
        "wall_s": max((event["time_s"] for event in log), default=0.0),
        "usd": cost.usd,
        "reserved_usd": cost.reserved_usd,
        "spot_usd": cost.spot_usd,
        "reserved_utilisation": cost.utilisation("reserved"),
        "spot_utilisation": cost.utilisation("spot"),
        "usd_per_point": _usd_per_point(cost.usd, _values(rows, "eval/reward")),
        "gpu_s": {f"{role}_{phase}": seconds for (role, phase), seconds in cost.gpu_s.items()},
        "seeds_explored": sum(explored.values()),
        "preemptions": len(losses),
        "lost_samples": sum(event["count"] for event in _of(log, "lease_lost") if event["worker"] in spot),
        "lost_steps": cost.lost_steps,
        "lost_usd": cost.lost_usd,
        "failed_samples": len(_of(log, "request_failed")),
        "restarts": max(0, len(_of(log, "run_started")) - 1),
        "rank_correlation": mean(_values(rows, "explore/spearman")),
        "variance_ratio": _variance_ratio(rows),
    }
    return {name: _json_value(value) for name, value in summary.items()}


def write_summary(folder: Path, *, ledger: Ledger) -> Summary:
    """Computes the summary of a run folder and writes it to summary.json there."""
    events, metrics = folder / "events.jsonl", folder / "metrics.jsonl"
    rows = read_jsonl(metrics) if metrics.is_file() else iter(())
    summary = summarise(read_jsonl(events), rows, ledger=ledger)
    text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
    write_whole(folder / "summary.json", text)
    return summary


def five_lines(summary: Summary, folder: Path) -> str:
    """The summary as it is printed: learning, effort, exploration, and where to look on."""
    judge = _change(summary, "eval_judge")
    exploration = [f"{summary['seeds_explored']:,} seeds explored"]
    if summary["rank_correlation"] is not None:
        exploration.append(f"rank correlation {summary['rank_correlation']:.2f}")
    if summary["variance_ratio"] is not None:
        exploration.append(f"{summary['variance_ratio']:.1f} times the reward variance of random seeds")
    preemptions = f"{summary['preemptions']} preemption{'' if summary['preemptions'] == 1 else 's'}"
    if summary["lost_steps"]:
        preemptions += f" cost {summary['lost_steps']:,} denoising steps"
    effort = f"{summary['steps']} iterations in {duration(summary['wall_s'])}, {summary['usd']:.4f} usd"
    return "\n".join(
        (
            f"Held-out reward {_change(summary, 'eval_reward') or 'not measured'}"
            + (f", judge {judge}" if judge else ""),
            f"{effort}, {preemptions}",
            ", ".join(exploration),
            f"Run folder: {folder}",
            f"Report:     python -m src.report {folder}",
        )
    )


def _of(log: Sequence[Event], kind: str) -> list[Event]:
    return [event for event in log if event["kind"] == kind]


def _status(log: Sequence[Event]) -> str:
    ends = [event for event in log if event["kind"] in ("run_started", "run_ended")]
    return str(ends[-1]["status"]) if ends and ends[-1]["kind"] == "run_ended" else "unfinished"


def _preemptions(log: Sequence[Event], spot: Collection[str]) -> list[Event]:
    """Losses of spot workers while the run went on; those that leave, to form other groups or at its end, are none."""
    losses: list[Event] = []
    running = False
    for event in log:
        if event["kind"] in ("run_started", "run_ended"):
            running = event["kind"] == "run_started"
        elif event["kind"] == "worker_lost" and running and event["worker"] in spot and event["reason"] != "left":
            losses.append(event)
    return losses


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row and math.isfinite(row[name])]


def _ends(name: str, values: Sequence[float]) -> Summary:
    start, end = (values[0], values[-1]) if values else (None, None)
    return {f"{name}_start": start, f"{name}_end": end}


def _usd_per_point(usd: float, rewards: Sequence[float]) -> float:
    gained = rewards[-1] - rewards[0] if rewards else 0.0
    return usd / (100 * gained) if gained > 0 else math.nan


def _variance_ratio(rows: Sequence[Mapping[str, Any]]) -> float:
    """Kept over random, over the iterations that have both: those that exploration chose for."""
    kept, random = (
        {row["step"]: row[name] for row in rows if math.isfinite(row.get(name, math.nan))}
        for name in ("explore/variance_kept", "explore/variance_random")
    )
    below = mean([random[step] for step in random if step in kept])
    return mean([kept[step] for step in kept if step in random]) / below if below > 0 else math.nan


def _json_value(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _change(summary: Summary, name: str) -> str:
    start, end = summary[f"{name}_start"], summary[f"{name}_end"]
    return "" if start is None else f"{start:.3f} -> {end:.3f}"
