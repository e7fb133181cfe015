"""What a run cost: a pure fold over its event log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_S_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Cost:
    reserved_s: float
    """GPU-seconds of the training ranks: they are paid for as long as the run lasts."""
    spot_s: float
    """GPU-seconds of the spot workers: each is paid for while it is a member."""
    reserved_usd: float
    spot_usd: float

    @property
    def usd(self) -> float:
        return self.reserved_usd + self.spot_usd


class Ledger:
    """Adds events up: `for event in events: ledger.add(event)`; `ledger.cost` is right at any moment.

    usd = reserved price x reserved GPUs x run time + spot price x sum over spot workers of (joined .. lost).

    Args:
        reserved_usd_per_gpu_hour, spot_usd_per_gpu_hour: prices of one GPU.
        reserved_gpus: GPUs of the training ranks.
    """

    def __init__(
        self, *, reserved_usd_per_gpu_hour: float, spot_usd_per_gpu_hour: float, reserved_gpus: int = 1
    ) -> None:
        for name, price in (
            ("reserved_usd_per_gpu_hour", reserved_usd_per_gpu_hour),
            ("spot_usd_per_gpu_hour", spot_usd_per_gpu_hour),
        ):
            if price < 0:
                raise ValueError(f"{name} must not be negative, got {price}")
        self._reserved_usd_per_gpu_hour = reserved_usd_per_gpu_hour
        self._spot_usd_per_gpu_hour = spot_usd_per_gpu_hour
        self._reserved_gpus = reserved_gpus
        self._now_s = 0.0
        self._spot_s = 0.0
        self._joined_s: dict[str, float] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        time_s = float(event["time_s"])
        kind = event["kind"]
        if kind == "run_started":  # an earlier life was killed: its workers ended with its last event
            self._spot_s += sum(self._now_s - joined_s for joined_s in self._joined_s.values())
            self._joined_s.clear()
        elif kind == "worker_joined" and event["role"] == "spot":
            self._joined_s[event["worker"]] = time_s
        elif kind == "worker_lost" and event["worker"] in self._joined_s:
            self._spot_s += time_s - self._joined_s.pop(event["worker"])
        self._now_s = max(self._now_s, time_s)

    @property
    def cost(self) -> Cost:
        """Up to the last event."""
        reserved_s = self._reserved_gpus * self._now_s
        spot_s = self._spot_s + sum(self._now_s - joined_s for joined_s in self._joined_s.values())
        return Cost(
            reserved_s=reserved_s,
            spot_s=spot_s,
            reserved_usd=reserved_s / _S_PER_HOUR * self._reserved_usd_per_gpu_hour,
            spot_usd=spot_s / _S_PER_HOUR * self._spot_usd_per_gpu_hour,
        )


def cost_of(events: Iterable[Mapping[str, Any]], **prices: Any) -> Cost:
    """The cost of a whole event log; see `Ledger` for the prices."""
    ledger = Ledger(**prices)
    for event in events:
        ledger.add(event)
    return ledger.cost
