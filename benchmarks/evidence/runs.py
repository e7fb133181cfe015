"""The runs behind docs/evidence.md: which there are, and what is kept of each.

What a run learns is decided by its task, its learning seed and the seeds it trains on. Systems that train on random
seeds learn alike on any cluster: they share one run, and only its iterations are timed anew (`app.virtual.rehearse`).
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.evidence.systems import System
from benchmarks.job import ROOT, quiet, resolved
from benchmarks.output import say
from src.app.config import Config, build_ledger
from src.app.summary import summarise
from src.app.virtual import rehearse, train
from src.core.clock import monotonic_s
from src.core.events import JsonLines, read_jsonl

Row = dict[str, Any]

COMMON = (
    "experiment=tiny_text",
    "callbacks.evaluate.every=2",
    "callbacks.evaluate.images=0",
    "~callbacks.checkpoint",
    "~callbacks.export",
)


@dataclass(frozen=True)
class Run:
    """One run: equal runs have equal results."""

    system: str
    overrides: tuple[str, ...]
    iterations: int
    learning_rate: float
    seed: int
    trace: str
    """File of the market's trace, and its pace if that is not the trace's own; empty for GPUs that are always there."""

    @cached_property
    def config(self) -> Config:
        return resolved(self.all_overrides)

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(self.decisive, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def decisive(self) -> Config:
        """All that is configured, hardware and prices included, but for where results are kept and shown.

        What is off is left out, so that a setting that comes later, and is off, changes no key; so is where the
        project is.
        """
        return {name: _that_is_on(value) for name, value in self.config.items() if name not in ("paths", "logger")}

    @property
    def all_overrides(self) -> list[str]:
        file, _, pace = self.trace.partition(" x")
        market = [f"market.trace={_TRACES / file}"] if file else []
        if pace:
            market.append(f"market.time_scale={float(pace)}")
        return [
            *COMMON,
            *self.overrides,
            *market,
            f"seed={self.seed}",
            f"trainer.max_steps={self.iterations}",
            f"algo.optimizer.lr={self.learning_rate}",
        ]


def _that_is_on(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace(f"{ROOT}/", "")
    if not isinstance(value, Mapping):
        return value
    return {name: _that_is_on(inner) for name, inner in value.items() if inner is not None and inner is not False}


_TRACES = ROOT / "data" / "traces"


def planned(system: System, *, learning_rate: float, seed: int, trace: str = "", iterations: int | None = None) -> Run:
    """A run of a system; `trace` counts for those with a market only."""
    calm = ("market=none", "cluster.spot_nodes=4") if system.market and not trace else ()
    return Run(
        system=system.name,
        overrides=(*system.overrides, *calm),
        iterations=iterations or system.iterations,
        learning_rate=learning_rate,
        seed=seed,
        trace=trace if system.market else "",
    )


class Store:
    """Rows of runs, kept in a file: a run that is there is not repeated."""

    def __init__(self, file: Path, jobs: int) -> None:
        self._rows = {(row["key"], row["learnt"]): row for row in read_jsonl(file)} if file.exists() else {}
        self._file = JsonLines(file)
        self._jobs = jobs

    def close(self) -> None:
        self._file.close()

    def rows(self, runs: Sequence[Run], *, learn: bool = True) -> list[Row]:
        """The rows of the runs, in order; those that are not there yet are made."""
        missing = [run for run in dict.fromkeys(runs) if (run.key, learn) not in self._rows]
        for number, row in enumerate(self._made(missing, learn), start=1):
            self._rows[row["key"], learn] = row
            self._file.append(row)
            final = row["curve"][-1]
            say(
                f"{number}/{len(missing)} {row['system']} lr {row['learning_rate']:g} seed {row['seed']} "
                f"{row['trace'] or 'calm'}: {final['reward'] or 0:.3f} after {final['seconds'] / 3600:.2f} h, "
                f"{final['usd']:.0f} usd ({row['took_s']:.0f} s)"
            )
        return [self._rows[run.key, learn] for run in runs]

    def _made(self, runs: Sequence[Run], learn: bool) -> Iterator[dict[str, Any]]:
        if not runs:
            return
        with ProcessPoolExecutor(self._jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            for done in as_completed([pool.submit(execute, run, learn=learn) for run in runs]):
                yield done.result()


def execute(run: Run, *, learn: bool = True) -> dict[str, Any]:
    """The row of a run: what it had reached, and used, at each evaluation.

    Args:
        learn: False times the iterations only, and its scores are missing.
    """
    quiet()
    started_s = monotonic_s()
    config = run.config
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (train if learn else rehearse)(config, folder).shutdown()
        events, metrics = list(read_jsonl(folder / "events.jsonl")), list(read_jsonl(folder / "metrics.jsonl"))
    summary = summarise(events, metrics, ledger=build_ledger(config))
    return {
        **{each.name: getattr(run, each.name) for each in fields(run)},
        "key": run.key,
        "learnt": learn,
        "curve": curve(metrics),
        "explored": [row["explore/explored"] for row in metrics if "explore/explored" in row],
        "preemptions": sum(event["kind"] == "node_went" for event in events),
        **{name: summary[name] for name in KEPT},
        "took_s": monotonic_s() - started_s,
    }


KEPT = (
    "lost_steps",
    "lost_usd",
    "reserved_utilisation",
    "spot_utilisation",
    "gpu_s",
    "rank_correlation",
    "variance_ratio",
)


def curve(metrics: Sequence[dict[str, Any]]) -> list[dict[str, float | None]]:
    """What had been done, passed and paid at the end of each iteration that was evaluated, or timed.

    The first row of a step is of its end; later ones may be of what was explored afterwards, on the critical path.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for row in metrics:
        by_step[row["step"]] = {**row, **by_step.get(row["step"], {})}
    return [
        {
            "iteration": step,
            "seconds": row["time_s"],
            "usd": row.get("cost/usd", 0.0),
            "reward": row.get("eval/reward"),
            "judge": row.get("eval/judge"),
        }
        for step, row in sorted(by_step.items())
        if "eval/reward" in row or "eval/reward" not in by_step.get(0, {})
    ]


def with_scores(timed: dict[str, Any], learnt: dict[str, Any]) -> dict[str, Any]:
    """A timed run with the scores of one that learns alike."""
    at = {row["iteration"]: row for row in timed["curve"]}
    start = {"seconds": 0.0, "usd": 0.0}
    rows = [
        {**row, **{name: at.get(row["iteration"], start)[name] for name in ("seconds", "usd")}}
        for row in learnt["curve"]
    ]
    return {**timed, "curve": rows}
