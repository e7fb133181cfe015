"""What a GPU costs, by zone, role and time. Nothing here assumes that spot is the cheaper one."""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

_S_PER_HOUR = 3600.0
_ROLES = ("reserved", "spot")


class PriceError(ValueError):
    """A price table that cannot be read. The message begins with file and line."""


class Prices(Protocol):
    """`role` is that of a `Member`: `reserved` (paid on demand) or `spot`. Times are seconds since the run's start."""

    def price_usd_per_gpu_hour(self, zone: str, role: str, time_s: float) -> float:
        """The price at a moment. Raises ValueError if there is none for this zone and role."""

    def usd_per_gpu(self, zone: str, role: str, start_s: float, end_s: float) -> float:
        """What one GPU costs from start to end: the integral of its price."""


@dataclass(frozen=True, kw_only=True)
class FixedPrices:
    """One price per role, in every zone and at all times."""

    reserved_usd_per_gpu_hour: float
    spot_usd_per_gpu_hour: float

    def __post_init__(self) -> None:
        for role in _ROLES:
            name = f"{role}_usd_per_gpu_hour"
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")

    def price_usd_per_gpu_hour(self, zone: str, role: str, time_s: float) -> float:
        prices = {"reserved": self.reserved_usd_per_gpu_hour, "spot": self.spot_usd_per_gpu_hour}
        if role not in prices:
            raise ValueError(f"role must be one of {', '.join(_ROLES)}, got {role!r}")
        return prices[role]

    def usd_per_gpu(self, zone: str, role: str, start_s: float, end_s: float) -> float:
        return self.price_usd_per_gpu_hour(zone, role, start_s) * (end_s - start_s) / _S_PER_HOUR


class PriceTable:
    """Prices per zone and role that hold from a time until the next one; before its first time the first one holds.

    Args:
        rows: (zone, role) -> [(time_s, usd per GPU and hour), ...] in order of time, at least one each.
    """

    def __init__(self, rows: Mapping[tuple[str, str], Sequence[tuple[float, float]]]) -> None:
        self._times = {key: [time_s for time_s, _ in steps] for key, steps in rows.items()}
        self._prices = {key: [price for _, price in steps] for key, steps in rows.items()}

    @property
    def zones(self) -> tuple[str, ...]:
        return tuple(sorted({zone for zone, _ in self._prices}))

    def price_usd_per_gpu_hour(self, zone: str, role: str, time_s: float) -> float:
        prices = self._of(zone, role)
        return prices[max(0, bisect_right(self._times[zone, role], time_s) - 1)]

    def usd_per_gpu(self, zone: str, role: str, start_s: float, end_s: float) -> float:
        self._of(zone, role)
        changes = [time_s for time_s in self._times[zone, role] if start_s < time_s < end_s]
        edges = [start_s, *changes, end_s]
        return sum(
            self.price_usd_per_gpu_hour(zone, role, begin_s) * (until_s - begin_s) / _S_PER_HOUR
            for begin_s, until_s in pairwise(edges)
        )

    def _of(self, zone: str, role: str) -> list[float]:
        try:
            return self._prices[zone, role]
        except KeyError:
            raise ValueError(
                f"no price for a {role} GPU in zone={zone}; the table has zones {', '.join(self.zones)}"
            ) from None


def read_prices(path: str | Path) -> PriceTable:
    """Reads a CSV file with the columns `zone`, `reserved_usd_per_gpu_hour`, `spot_usd_per_gpu_hour` and, if prices
    change, `time_s` (seconds since the run's start, increasing within a zone; 0 if it is missing).

    Raises:
        PriceError: the file is no such table, or a damaged one.
        OSError: it cannot be opened.
    """
    path = Path(path)
    table: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for line, row in _rows(path, ("zone", "reserved_usd_per_gpu_hour", "spot_usd_per_gpu_hour")):
        time_s = _number(path, line, "time_s", row.get("time_s") or "0")
        for role in _ROLES:
            name = f"{role}_usd_per_gpu_hour"
            steps = table.setdefault((row["zone"], role), [])
            if steps and time_s <= steps[-1][0]:
                raise PriceError(f"{path}:{line}: time_s must increase within zone {row['zone']}, got {time_s:g}")
            steps.append((time_s, _number(path, line, name, row[name])))
    return PriceTable(table)


def read_catalog(path: str | Path, *, gpu: str) -> PriceTable:
    """Reads the prices of a GPU type from a catalog like data/prices/gcp_verda_gpu_prices.csv.

    Its rows price a machine with `count` GPUs, on demand (`reserved`) and as spot. Where `what` says that a row is
    for the accelerator only and to add the host, the row of the host `for <count>x<gpu>` in that zone is added.

    Raises:
        PriceError: the file is no such catalog, lacks the GPU or a host, or is damaged.
        OSError: it cannot be opened.
    """
    path = Path(path)
    machines: list[tuple[int, dict[str, str]]] = []
    hosts: list[tuple[int, dict[str, str]]] = []
    line = 1
    for line, row in _rows(path, ("gpu", "count", "zone", "on_demand_usd_h", "spot_usd_h", "what")):
        if row["gpu"] == gpu:
            machines.append((line, row))
        elif row["gpu"].startswith("host "):
            hosts.append((line, row))
    if not machines:
        raise PriceError(f"{path}:{line}: no row up to here prices gpu={gpu}")
    table: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for line, row in machines:
        zone, count = row["zone"], _number(path, line, "count", row["count"])
        if count < 1 or (zone, "spot") in table:
            raise PriceError(f"{path}:{line}: count must be at least 1, and each zone may have one row for gpu={gpu}")
        parts = [(line, row)]
        if "add host" in row["what"]:
            parts += _hosts_of(row, hosts)[:1]
            if len(parts) == 1:
                raise PriceError(f"{path}:{line}: no row prices the host of {row['count']}x{gpu} in {zone}")
        for role, column in zip(_ROLES, ("on_demand_usd_h", "spot_usd_h"), strict=True):
            usd_h = sum(_number(path, at, column, part[column]) for at, part in parts)
            table[zone, role] = [(0.0, usd_h / count)]
    return PriceTable(table)


def _hosts_of(machine: dict[str, str], hosts: Sequence[tuple[int, dict[str, str]]]) -> list[tuple[int, dict[str, str]]]:
    """Host rows for this many GPUs of this type in this zone; they may leave out the memory size (`1xH100`)."""
    name = f"{machine['count']}x{machine['gpu']}"
    return [
        (line, host)
        for line, host in hosts
        if host["zone"] == machine["zone"] and name.startswith(host["what"].rpartition(" for ")[2])
    ]


def _rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and fields by column of every row; all `columns` are there and not empty."""
    lines = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            lines.append(line.decode())
        except UnicodeDecodeError as error:
            raise PriceError(f"{path}:{number}: {error}") from error
    table = csv.DictReader(lines, strict=True)
    try:
        missing = [name for name in columns if name not in (table.fieldnames or ())]
        if missing:
            raise ValueError(f"the first line must name the columns {', '.join(columns)}; no {', '.join(missing)}")
        empty = True
        for row in table:
            if None in row or any(not row[name] for name in columns):
                raise ValueError(f"expected the {len(table.fieldnames or ())} fields that the first line names")
            empty = False
            yield table.reader.line_num, row
        if empty:
            raise ValueError("the table has no rows")
    except (ValueError, csv.Error) as error:
        raise PriceError(f"{path}:{max(1, table.reader.line_num)}: {error}") from error


def _number(path: Path, line: int, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise PriceError(f"{path}:{line}: {name} must be a number of at least 0, got {text!r}")
    return value
