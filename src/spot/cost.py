"""What a run cost, and what for: a pure fold over its event log.

GPU-seconds and usd are booked on accounts (role, phase):

    reserved    rollout, train, eval, explore: the trainer's phases; sync: publishing weights; idle: the rest of the run
    spot        rollout, explore, audit, eval: making samples; train; sync: the rest of a lease (loading weights,
                messages); lost: work that must be repeated; idle: the rest of what is paid for

A spot node is paid for from its coming to its going, starting time included; where the log names no nodes, a worker is
while it is a member.

A lease that was lost is split by its denoising steps: those that were committed are work, the others are lost. A lease
that is not over yet counts as work, and so does one that was cut off with its exploration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from src.spot.prices import Prices

_PHASE_OF = {"evaluate": "eval"}
"""Phases of the trainer that are the same work as a request kind."""


class Account(NamedTuple):
    role: str
    phase: str


@dataclass(frozen=True)
class Cost:
    """Where money and time went."""

    gpu_s: Mapping[Account, float]
    usd_of: Mapping[Account, float]
    lost_steps: int
    """Denoising steps (sample x step) that spot workers had begun and that must be repeated."""

    @property
    def usd(self) -> float:
        return sum(self.usd_of.values())

    @property
    def reserved_s(self) -> float:
        """GPU-seconds of the training ranks: they are paid for as long as the run lasts."""
        return self._sum(self.gpu_s, "reserved")

    @property
    def spot_s(self) -> float:
        """GPU-seconds of the spot side."""
        return self._sum(self.gpu_s, "spot")

    @property
    def reserved_usd(self) -> float:
        return self._sum(self.usd_of, "reserved")

    @property
    def spot_usd(self) -> float:
        return self._sum(self.usd_of, "spot")

    @property
    def lost_s(self) -> float:
        """GPU-seconds of spot workers whose work must be repeated."""
        return self.gpu_s.get(Account("spot", "lost"), 0.0)

    @property
    def lost_usd(self) -> float:
        return self.usd_of.get(Account("spot", "lost"), 0.0)

    def utilisation(self, role: str) -> float:
        """Share of a role's GPU-seconds that were neither idle nor lost; NaN if it had none."""
        total_s = self._sum(self.gpu_s, role)
        wasted_s = sum(self.gpu_s.get(Account(role, phase), 0.0) for phase in ("idle", "lost"))
        return 1 - wasted_s / total_s if total_s > 0 else float("nan")

    def metrics(self) -> dict[str, float]:
        """As logged once per iteration; all figures since the start of the run."""
        accounts = {f"cost/{role}_{phase}_s": seconds for (role, phase), seconds in self.gpu_s.items()}
        return {
            "cost/usd": self.usd,
            "cost/reserved_usd": self.reserved_usd,
            "cost/spot_usd": self.spot_usd,
            "cost/reserved_utilisation": self.utilisation("reserved"),
            "cost/spot_utilisation": self.utilisation("spot"),
            "cost/lost_usd": self.lost_usd,
            "cost/lost_steps": float(self.lost_steps),
            **accounts,
        }

    @staticmethod
    def _sum(amounts: Mapping[Account, float], role: str) -> float:
        return sum(amount for account, amount in amounts.items() if account.role == role)


class _Books:
    """Amounts by account."""

    def __init__(self, prices: Prices, zone: str) -> None:
        self._prices = prices
        self._zone = zone
        self.gpu_s: dict[Account, float] = {}
        self.usd: dict[Account, float] = {}

    def book(self, role: str, phase: str, start_s: float, end_s: float, parts: float = 1.0) -> None:
        """`parts`: how many GPUs, or which share of one."""
        account = Account(role, phase)
        usd = self._prices.usd_per_gpu(self._zone, role, start_s, end_s)
        self.gpu_s[account] = self.gpu_s.get(account, 0.0) + parts * (end_s - start_s)
        self.usd[account] = self.usd.get(account, 0.0) + parts * usd

    def copy(self) -> _Books:
        twin = _Books(self._prices, self._zone)
        twin.gpu_s, twin.usd = self.gpu_s.copy(), self.usd.copy()
        return twin


@dataclass(frozen=True)
class _OpenLease:
    worker: str
    kind: str
    granted_s: float
    gpus: int


@dataclass(frozen=True)
class _Paid:
    """GPUs that are paid for since a moment."""

    since_s: float
    gpus: int


_PAID = "paid"
"""The phase under which a role's whole time is booked, until what it was not used for is known to be idle."""


class Ledger:
    """Adds events up: `for event in events: ledger.add(event)`; `ledger.cost` is right at any moment.

    Args:
        prices: of one GPU.
        zone: where all of them are.
        reserved_gpus: GPUs of the training ranks.
    """

    def __init__(self, *, prices: Prices, zone: str = "", reserved_gpus: int = 1) -> None:
        if reserved_gpus < 1:
            raise ValueError(f"reserved_gpus must be at least 1, got {reserved_gpus}")
        for role in ("reserved", "spot"):
            prices.price_usd_per_gpu_hour(zone, role, 0.0)  # raises here what it would raise in the middle of a run
        self._prices = prices
        self._zone = zone
        self._reserved_gpus = reserved_gpus
        self._now_s = 0.0
        self._books = _Books(prices, zone)
        self._joined: dict[str, _Paid] = {}
        self._nodes: dict[str, _Paid] = {}
        self._names_nodes = False
        self._leases: dict[int, _OpenLease] = {}
        self._lost_steps = 0

    def add(self, event: Mapping[str, Any]) -> None:
        time_s = float(event["time_s"])
        match event["kind"]:
            case "run_started":
                self._restart()
            case "worker_joined" if event["role"] == "spot":
                self._joined[event["worker"]] = _Paid(time_s, event.get("gpus", 1))
            case "worker_lost" if event["worker"] in self._joined:
                gone = self._joined.pop(event["worker"])
                if not self._names_nodes:
                    self._pay(self._books, gone, time_s)
            case "node_came":
                self._names_nodes = True
                self._nodes[event["node"]] = _Paid(time_s, event["gpus"])
            case "node_went":
                self._pay(self._books, self._nodes.pop(event["node"]), time_s)
            case "lease_granted" if paid := self._joined.get(event["worker"]):
                opened = _OpenLease(event["worker"], event["request_kind"], time_s, paid.gpus)
                self._leases[event["lease"]] = opened
            case "lease_done" if lease := self._leases.pop(event["lease"], None):
                self._done(lease, time_s, event["denoise_s"] + event["decode_s"] + event["score_s"])
            case "lease_lost" if lease := self._leases.pop(event["lease"], None):
                if event.get("reason") == "dropped":
                    self._books.book("spot", lease.kind, lease.granted_s, time_s, lease.gpus)
                else:
                    self._lose(lease, time_s, event.get("committed_steps", 0), event.get("lost_steps", 0))
            case "phase":
                phase = _PHASE_OF.get(event["name"], event["name"])
                self._books.book("reserved", phase, event["start_s"], event["end_s"], self._reserved_gpus)
            case "spot_trained":
                phase = "lost" if event["lost"] else "train"
                self._books.book("spot", phase, event["start_s"], event["end_s"], event["gpus"])
            case "policy_published":
                self._books.book("reserved", "sync", time_s - event["publish_s"], time_s, self._reserved_gpus)
        self._now_s = max(self._now_s, time_s)

    def usd_per_hour(self, role: str) -> float:
        """The present price of all training GPUs together, or of one spot GPU."""
        gpus = self._reserved_gpus if role == "reserved" else 1
        return gpus * self._prices.price_usd_per_gpu_hour(self._zone, role, self._now_s)

    @property
    def cost(self) -> Cost:
        """Up to the last event."""
        books = self._books.copy()
        books.book("reserved", _PAID, 0.0, self._now_s, self._reserved_gpus)
        for paid in self._paid_for():
            self._pay(books, paid, self._now_s)
        for lease in self._leases.values():
            books.book("spot", lease.kind, lease.granted_s, self._now_s, lease.gpus)
        return Cost(_with_idle(books.gpu_s), _with_idle(books.usd), self._lost_steps)

    def _restart(self) -> None:
        """An earlier life was killed: its workers ended with its last event, and what they did is lost."""
        for paid in self._paid_for():
            self._pay(self._books, paid, self._now_s)
        for lease in self._leases.values():
            self._books.book("spot", "lost", lease.granted_s, self._now_s, lease.gpus)
        self._joined.clear()
        self._nodes.clear()
        self._names_nodes = False
        self._leases.clear()

    def _paid_for(self) -> Iterable[_Paid]:
        return (self._nodes if self._names_nodes else self._joined).values()

    @staticmethod
    def _pay(books: _Books, paid: _Paid, until_s: float) -> None:
        books.book("spot", _PAID, paid.since_s, until_s, paid.gpus)

    def _done(self, lease: _OpenLease, time_s: float, work_s: float) -> None:
        span_s = time_s - lease.granted_s
        share = min(1.0, work_s / span_s) if span_s > 0 else 1.0
        self._books.book("spot", lease.kind, lease.granted_s, time_s, lease.gpus * share)
        self._books.book("spot", "sync", lease.granted_s, time_s, lease.gpus * (1 - share))

    def _lose(self, lease: _OpenLease, time_s: float, committed: int, lost: int) -> None:
        self._lost_steps += lost
        if committed + lost:
            share = lost / (committed + lost)
            self._books.book("spot", lease.kind, lease.granted_s, time_s, lease.gpus * (1 - share))
            self._books.book("spot", "lost", lease.granted_s, time_s, lease.gpus * share)


def _with_idle(amounts: Mapping[Account, float]) -> dict[Account, float]:
    """What was paid for and not used is idle."""
    used = {account: amount for account, amount in sorted(amounts.items()) if account.phase != _PAID}
    for role in ("reserved", "spot"):
        busy = sum(amount for account, amount in used.items() if account.role == role)
        used[Account(role, "idle")] = max(0.0, amounts.get(Account(role, _PAID), 0.0) - busy)
    return used


def cost_of(events: Iterable[Mapping[str, Any]], *, prices: Prices, zone: str = "", reserved_gpus: int = 1) -> Cost:
    """The cost of a whole event log; see `Ledger`."""
    ledger = Ledger(prices=prices, zone=zone, reserved_gpus=reserved_gpus)
    for event in events:
        ledger.add(event)
    return ledger.cost
