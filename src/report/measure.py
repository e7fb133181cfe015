"""What a comparison shows of one run: the event log read once, with the ledger's sum at every evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from src.core.events import Event
from src.report.choices import Choices, choices
from src.report.read import Run
from src.report.timeline import Timeline, timeline
from src.spot.cost import Cost, Ledger
from src.spot.prices import FixedPrices, Prices, read_catalog, read_prices


@dataclass(frozen=True)
class Evaluation:
    """Held-out scores, and what had been spent by then. Not measured: NaN."""

    iteration: float
    hours: float
    usd: float
    reward: float
    judge: float


@dataclass(frozen=True)
class Measured:
    """One run of a comparison."""

    name: str
    status: str
    settings: Mapping[str, str]
    evaluations: tuple[Evaluation, ...]
    """By iteration; of several at one iteration (a resumed run does its last ones again) the last."""
    iterations: float
    hours: float
    cost: Cost | None
    """None: the prices are not known; `unpriced` says why."""
    unpriced: str
    preemptions: float
    """NaN until the run has ended, like `seeds_explored`."""
    seeds_explored: float
    choices: Choices
    timeline: Timeline

    @property
    def usd(self) -> float:
        return math.nan if self.cost is None else self.cost.usd

    def utilisation(self, role: str) -> float:
        return math.nan if self.cost is None else self.cost.utilisation(role)


def measure(run: Run) -> Measured:
    """Reads a run's log. Raises KeyError if an event lacks a field."""
    unpriced, ledger = "", None
    try:
        ledger = ledger_of(run.settings)
    except (ValueError, OSError) as error:
        unpriced = str(error)
    return Measured(
        name=run.name,
        status=run.status,
        settings=run.settings,
        evaluations=_evaluations(run, ledger),
        iterations=max((step for name in run.curves for step, _ in run.curves[name][-1:]), default=0.0),
        hours=run.wall_s / 3600,
        cost=None if ledger is None else ledger.cost,
        unpriced=unpriced,
        preemptions=_number(run.summary.get("preemptions")),
        seeds_explored=_number(run.summary.get("seeds_explored")),
        choices=choices(run.events),
        timeline=timeline(run.events),
    )


def _evaluations(run: Run, ledger: Ledger | None) -> tuple[Evaluation, ...]:
    found: dict[float, Evaluation] = {}
    for event in run.events:
        if ledger is not None:
            ledger.add(event)
        if event["kind"] == "evaluated":
            evaluation = _evaluation(event, math.nan if ledger is None else ledger.cost.usd)
            found[evaluation.iteration] = evaluation
    return tuple(found[iteration] for iteration in sorted(found))


def _evaluation(event: Event, usd: float) -> Evaluation:
    reward, judge = (_number(event.get(name)) for name in ("reward", "judge"))
    return Evaluation(float(event["iteration"]), float(event["time_s"]) / 3600, usd, reward, judge)


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _fixed(settings: Mapping[str, str]) -> Prices:
    reserved, spot = (float(settings[f"prices.{role}_usd_per_gpu_hour"]) for role in ("reserved", "spot"))
    return FixedPrices(reserved_usd_per_gpu_hour=reserved, spot_usd_per_gpu_hour=spot)


_PRICES: Mapping[str, Callable[[Mapping[str, str]], Prices]] = {
    "src.spot.prices.FixedPrices": _fixed,
    "src.spot.prices.read_prices": lambda settings: read_prices(settings["prices.path"]),
    "src.spot.prices.read_catalog": lambda settings: read_catalog(settings["prices.path"], gpu=settings["prices.gpu"]),
}
"""The price lists that a configuration may name. Nothing else that a run folder names is ever called."""


def ledger_of(settings: Mapping[str, str]) -> Ledger:
    """An empty ledger with the prices, zone and reserved GPUs of a configuration.

    Raises:
        ValueError: they are not there, or not known here.
        OSError: the price table is not there.
    """
    read = _PRICES.get(settings.get("prices._target_", ""))
    if read is None:
        raise ValueError(f"no prices that are known here: prices._target_={settings.get('prices._target_', 'null')}")
    try:
        gpus = int(settings.get("cluster.reserved_gpus") or settings["trainer.devices"])
        return Ledger(prices=read(settings), zone=settings.get("market.zone", ""), reserved_gpus=gpus)
    except KeyError as error:
        raise ValueError(f"no prices: the configuration lacks {error.args[0]}") from error
