"""Is it faster and cheaper? Whole systems on virtual clusters, with real learning (docs/evidence.md).

python -m benchmarks.evidence --quick            # a look: fewer systems, 2 seeds, 2 markets, one rate (minutes)
python -m benchmarks.evidence                    # 5 seeds, 5 markets (two hours and a half on 2 cores)
python -m benchmarks.evidence --full             # and ablations, and what else was tried
python -m benchmarks.evidence --table            # the tables, from the runs that are there

Every system is first tried at three learning rates on the first two seeds and the calm market; the one with the best
mean score over its iterations is run on all seeds and markets. Runs are kept in OUT and not repeated; OUT/curves.svg
shows score against hours and against usd.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.evidence.figure import picture
from benchmarks.evidence.runs import Row, Run, Store, planned, with_scores
from benchmarks.evidence.systems import (
    ABLATED_ON,
    ABLATIONS,
    BASELINES,
    BEYOND,
    LEFT_OUT,
    LEVERS,
    LEVERS_ON,
    NOT_DRAWN,
    PODS,
    SLOWER,
    SPOTLIGHT,
    SYSTEMS,
    TRACES,
    System,
)
from benchmarks.evidence.tables import effort_table, figures, goals, judged, ratio_table, scores
from benchmarks.output import print_figures, say
from src.core.stats import mean

TUNED_ON = 2
"""Learning seeds on which learning rates are compared."""


def best_rate(system: System, store: Store, seeds: Sequence[int]) -> float:
    """The learning rate with the best mean score over a run's evaluations, on a calm market."""
    if len(system.rates) == 1:
        return system.rates[0]
    runs = {
        rate: [planned(system, learning_rate=rate, seed=seed) for seed in seeds[:TUNED_ON]] for rate in system.rates
    }
    rows = iter(store.rows([run for group in runs.values() for run in group]))
    means = {rate: mean([mean(scores(next(rows))) for _ in group]) for rate, group in runs.items()}
    say(f"{system.name}: " + ", ".join(f"lr {rate:g} {score:.3f}" for rate, score in means.items()))
    return max(means, key=means.__getitem__)


def rows_of(
    system: System, store: Store, rate: float, seeds: Sequence[int], traces: Sequence[str], iterations: int | None
) -> list[Row]:
    """The runs of a system on all seeds and markets; what it learns on any of them alike is learnt once."""
    markets = traces if system.market else [""]

    def run(of: System, seed: int, trace: str) -> Run:
        return planned(of, learning_rate=rate, seed=seed, trace=trace, iterations=iterations)

    runs = [run(system, seed, trace) for seed in seeds for trace in markets]
    if not system.learns:
        return store.rows(runs)
    teacher = next(each for each in SYSTEMS.values() if each.learns == system.learns)
    learnt = store.rows([run(teacher, each.seed, "") for each in runs])
    if system is teacher:
        return learnt
    timed = store.rows(runs, learn=False)
    return [with_scores(*pair) for pair in zip(timed, learnt, strict=True)]


def ablations(store: Store, rates: Mapping[str, float], whole: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """Systems and their variants, on some seeds and markets."""
    seeds, traces = ABLATED_ON
    found = {}
    for system, variants in ABLATIONS.items():
        found[system.name] = [row for row in whole[system.name] if row["seed"] in seeds and row["trace"] in traces]
        for each in variants:
            rate = each.rates[0] if len(each.rates) == 1 else rates[system.learns or system.name]
            found[each.name] = rows_of(each, store, rate, seeds, traces, None)
    return found


def levers(store: Store, rate: float, whole: Sequence[Row]) -> dict[str, list[Row]]:
    """What was tried to learn more from an iteration."""
    runs = {each.name: [planned(each, learning_rate=rate, seed=seed) for seed in LEVERS_ON] for each in LEVERS}
    base = [row for row in whole if row["seed"] in LEVERS_ON]
    return {PODS.name: base} | {name: store.rows(of) for name, of in runs.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer systems, seeds, markets and iterations")
    parser.add_argument("--full", action="store_true", help="ablations and what else was tried, too")
    parser.add_argument("--table", action="store_true", help="print markdown instead of the JSON line")
    parser.add_argument("--by-judge", action="store_true", help="the judge's scores instead of the reward's")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time, one thread each")
    parser.add_argument("--out", type=Path, default=Path("results/evidence"), help="where runs are kept")
    options = parser.parse_args(arguments)
    seeds, traces = (range(2), TRACES[:2]) if options.quick else (range(5), TRACES)
    store = Store(options.out / "runs.jsonl", options.jobs)
    found: dict[str, list[Row]] = {}
    rates: dict[str, float] = {}
    for system in (each for name, each in SYSTEMS.items() if not (options.quick and name in LEFT_OUT)):
        iterations = system.iterations // 2 if options.quick else None
        kind = system.learns or system.name
        if kind not in rates:
            rates[kind] = system.rates[0] if options.quick else best_rate(system, store, seeds)
        found[system.name] = rows_of(system, store, rates[kind], seeds, traces, iterations)
    baselines = [system.name for system in BASELINES if system.name in found]
    ours = [system.name for system in (SPOTLIGHT, *BEYOND, *SLOWER) if system.market and system.name in found]
    tables: list[dict[str, list[Row]]] = [found]
    if options.full:
        tables.append(levers(store, rates[PODS.learns], found[PODS.name]))
        tables.append(ablations(store, rates, found))
    store.close()
    if options.by_judge:
        tables = [{name: judged(rows) for name, rows in table.items()} for table in tables]
        found = tables[0]
    else:
        drawn = {name: rows for name, rows in found.items() if name not in NOT_DRAWN}
        (options.out / "curves.svg").write_text(picture(drawn), encoding="utf-8")
    if options.table:
        wanted = goals({name: found[name] for name in baselines})
        print(*(ratio_table(found, baselines, name) for name in ours), sep="\n\n", end="\n\n")
        print(*(effort_table(rows, wanted) for rows in tables), sep="\n\n")
    else:
        print_figures("evidence", {name: figures(found, baselines, name) for name in ours})


if __name__ == "__main__":
    main()
