"""How much of the comparison rests on assumed numbers: each is halved and doubled, and systems are timed again.

python -m benchmarks.sensitivity            # a calm and a rough market (minutes)
python -m benchmarks.sensitivity --table    # as markdown
python -m benchmarks.sensitivity --quick    # few iterations: a test

Nothing is learnt: what an iteration takes and costs, and how many seeds are explored meanwhile, does not depend on
rewards with `planner=fixed`. Every figure of conf/hardware that is tagged `assumed` is moved.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.runs import COMMON
from benchmarks.job import ROOT, quiet, resolved
from benchmarks.output import print_figures, say
from src.app.config import build
from src.app.virtual import rehearse
from src.core.events import read_jsonl
from src.core.stats import mean

BASELINE, SYSTEM = "flow_grpo", "spotlight"
TRACES = ("", "parcae_segment_hh_55_65.txt")
FACTORS = (0.5, 2.0)


def timed(overrides: Sequence[str], iterations: int) -> dict[str, float]:
    """Seconds, usd and explored seeds per prompt, of one iteration."""
    config = resolved([*COMMON, *overrides, "seed=0", f"trainer.max_steps={iterations}"])
    with tempfile.TemporaryDirectory() as name:
        rehearse(config, Path(name)).shutdown()
        rows = list(read_jsonl(Path(name) / "metrics.jsonl"))
    last = [row for row in rows if "cost/usd" in row][-1]
    explored = [row["explore/explored"] for row in rows if "explore/explored" in row]
    return {
        "seconds": last["time_s"] / last["step"],
        "usd": last["cost/usd"] / last["step"],
        "seeds": mean(explored) / config["data"]["prompts_per_iteration"] if explored else 0.0,
    }


def moves(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names and overrides of all that is moved; first of all, nothing."""
    yield "as it is", ()
    for figure in build(config["hardware"], "hardware").assumed:
        value = config["hardware"]["figures"][figure]["value"]
        for factor in FACTORS:
            yield f"{figure} x {factor:g}", (f"hardware.figures.{figure}.value={value * factor}",)


def rows_of(iterations: int, quick: bool) -> Iterator[dict[str, Any]]:
    """A row per move and market: the system's iteration, and the baseline's over it."""
    config = resolved([*COMMON, f"system={SYSTEM}", f"market.trace={ROOT}/data/traces/{TRACES[1]}"])
    chosen = list(moves(config))[: 2 if quick else None]
    for name, moved in chosen:
        baseline = timed([f"system={BASELINE}", *moved], iterations)
        for trace in TRACES[: 1 if quick else None]:
            market = (f"market.trace={ROOT}/data/traces/{trace}",) if trace else ("market=none", "cluster.spot_nodes=4")
            ours = timed([f"system={SYSTEM}", *market, *moved], iterations)
            say(f"{name}, {trace or 'calm'}: {ours['seconds']:.0f} s, {ours['seeds']:.1f} seeds per prompt")
            yield {
                "moved": name,
                "market": trace or "calm",
                **ours,
                "seconds_ratio": baseline["seconds"] / ours["seconds"],
                "usd_ratio": baseline["usd"] / ours["usd"],
            }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        f"| moved | market | s per iteration | seeds per prompt | {BASELINE} / {SYSTEM}, s | usd |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['moved']} | {row['market'].removesuffix('.txt')} | {row['seconds']:.0f} | {row['seeds']:.1f} | "
            f"{row['seconds_ratio']:.2f} | {row['usd_ratio']:.2f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=48, help="of each run")
    parser.add_argument("--quick", action="store_true", help="3 iterations of one move on one market")
    parser.add_argument("--table", action="store_true", help="print markdown instead of the JSON line")
    options = parser.parse_args(arguments)
    quiet()
    rows = list(rows_of(3 if options.quick else options.iterations, options.quick))
    if options.table:
        print(table(rows))
    else:
        print_figures("sensitivity", {"rows": rows})


if __name__ == "__main__":
    main()
