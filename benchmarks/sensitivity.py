"""What an iteration takes and costs, and how many seeds are explored meanwhile, when one thing is another.

python -m benchmarks.sensitivity               # every assumed number is halved and doubled (minutes)
python -m benchmarks.sensitivity --of design   # parts of the system, the number of spot nodes, the resolution
python -m benchmarks.sensitivity --table       # as markdown
python -m benchmarks.sensitivity --quick       # few iterations: a test

On a calm and a rough market. Nothing is learnt: durations do not depend on rewards with `planner=fixed`. Assumed are
the figures of conf/hardware with that tag.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Move:
    """Something that is otherwise.

    Args:
        everywhere: overrides of the system and of the baseline.
        here: of the system alone.
        nodes: spot nodes.
    """

    name: str
    everywhere: tuple[str, ...] = ()
    here: tuple[str, ...] = ()
    nodes: int = 4


AS_IT_IS = Move("as it is")
DESIGN = (
    AS_IT_IS,
    Move("groups of 2", here=("cluster.sp_degree=2",)),
    Move("groups of 2, started anew", here=("cluster.sp_degree=2", "cluster.elastic=false")),
    Move("groups of 4", here=("cluster.sp_degree=4", "cluster.across_nodes=true")),
    Move(
        "groups of 4, started anew", here=("cluster.sp_degree=4", "cluster.across_nodes=true", "cluster.elastic=false")
    ),
    Move("lose instead of commit", here=("cluster.keeps_commits=false",)),
    *(Move(f"{nodes} spot nodes", nodes=nodes) for nodes in (1, 2, 8, 16)),
    Move("1280 x 1280", everywhere=("hardware=qwen_image_h100_1280",)),
    Move(
        "1280 x 1280, groups of 4",
        ("hardware=qwen_image_h100_1280",),
        ("cluster.sp_degree=4", "cluster.across_nodes=true"),
    ),
)


def assumed(config: Mapping[str, Any]) -> Iterator[Move]:
    """First of all, nothing is moved; then every figure that is assumed, down and up."""
    yield AS_IT_IS
    for figure in build(config["hardware"], "hardware").assumed:
        value = config["hardware"]["figures"][figure]["value"]
        for factor in FACTORS:
            yield Move(f"{figure} x {factor:g}", everywhere=(f"hardware.figures.{figure}.value={value * factor}",))


def rows_of(moves: Sequence[Move], iterations: int, traces: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row per move and market: the system's iteration, and the baseline's over it."""
    for move in moves:
        name = move.name
        baseline = timed([f"system={BASELINE}", *move.everywhere], iterations)
        for trace in traces:
            calm = ("market=none", f"cluster.spot_nodes={move.nodes}")
            market = (f"market.trace={ROOT}/data/traces/{trace}", f"market.nodes={move.nodes}") if trace else calm
            ours = timed([f"system={SYSTEM}", *market, *move.everywhere, *move.here], iterations)
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
    parser.add_argument("--of", choices=("assumed", "design"), default="assumed", help="what is moved")
    parser.add_argument("--iterations", type=int, default=48, help="of each run")
    parser.add_argument("--quick", action="store_true", help="3 iterations of one move on one market")
    parser.add_argument("--table", action="store_true", help="print markdown instead of the JSON line")
    options = parser.parse_args(arguments)
    quiet()
    config = resolved([*COMMON, f"system={SYSTEM}", f"market.trace={ROOT}/data/traces/{TRACES[1]}"])
    moves = list(assumed(config)) if options.of == "assumed" else DESIGN
    if options.quick:
        rows = list(rows_of(moves[:2], 3, TRACES[:1]))
    else:
        rows = list(rows_of(moves, options.iterations, TRACES))
    if options.table:
        print(table(rows))
    else:
        print_figures("sensitivity", {"of": options.of, "rows": rows})


if __name__ == "__main__":
    main()
