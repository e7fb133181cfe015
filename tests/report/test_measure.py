import json
import math
from pathlib import Path
from typing import Any

import pytest

from src.report.choices import choices
from src.report.measure import ledger_of, measure
from src.report.read import read_run
from src.spot.cost import cost_of
from src.spot.prices import FixedPrices
from tests.report.synthetic import write_run

PRICES = {
    "prices._target_": "src.spot.prices.FixedPrices",
    "prices.reserved_usd_per_gpu_hour": "36",
    "prices.spot_usd_per_gpu_hour": "3.6",
    "market.zone": "",
    "trainer.devices": "2",
}


def write(folder: Path, config: str, *events: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(config)
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def evaluated(time_s: float, iteration: int, reward: float) -> dict[str, Any]:
    return {"time_s": time_s, "kind": "evaluated", "iteration": iteration, "reward": reward, "judge": None}


CONFIG = """\
prices:
  _target_: src.spot.prices.FixedPrices
  reserved_usd_per_gpu_hour: 36
  spot_usd_per_gpu_hour: 3.6
market:
  zone: ''
cluster:
  reserved_gpus: 2
"""


def test_an_evaluation_knows_what_had_been_spent_by_then(tmp_path: Path) -> None:
    node = {"kind": "node_came", "node": "a", "gpus": 4}
    run = measure(
        read_run(
            write(
                tmp_path / "run",
                CONFIG,
                {"time_s": 0.0, "kind": "run_started"},
                evaluated(100.0, 0, 0.5),
                {"time_s": 100.0, **node},
                evaluated(1800.0, 4, 0.6),
                evaluated(3600.0, 4, 0.75),
                {"time_s": 7200.0, "kind": "run_ended", "status": "done"},
            )
        )
    )
    reserved_usd_s, spot_usd_s = 2 * 0.01, 4 * 0.001
    assert [point.iteration for point in run.evaluations] == [0, 4]
    assert [point.reward for point in run.evaluations] == [0.5, 0.75]
    assert [point.hours for point in run.evaluations] == [100 / 3600, 1.0]
    assert run.evaluations[0].usd == pytest.approx(100 * reserved_usd_s)
    assert run.evaluations[1].usd == pytest.approx(3600 * reserved_usd_s + 3500 * spot_usd_s)
    assert math.isnan(run.evaluations[0].judge)
    assert run.usd == pytest.approx(7200 * reserved_usd_s + 7100 * spot_usd_s)
    assert (run.hours, run.status, run.unpriced) == (2.0, "done", "")
    assert math.isnan(run.preemptions)


def test_a_whole_run_costs_what_the_ledger_says(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", images=False))
    measured = measure(run)
    prices = FixedPrices(reserved_usd_per_gpu_hour=10, spot_usd_per_gpu_hour=2.5)
    assert measured.cost == cost_of(run.events, prices=prices)
    assert measured.utilisation("spot") == cost_of(run.events, prices=prices).utilisation("spot")
    assert [point.usd for point in measured.evaluations] == sorted(point.usd for point in measured.evaluations)
    assert (measured.iterations, measured.seeds_explored, measured.preemptions) == (24, 384, 1)


def test_a_run_without_known_prices_is_measured_without_them(tmp_path: Path) -> None:
    run = measure(read_run(write(tmp_path / "run", "prices:\n  _target_: os.system\n", evaluated(3.6, 0, 0.5))))
    assert run.unpriced == "no prices that are known here: prices._target_=os.system"
    assert run.cost is None
    assert math.isnan(run.usd)
    assert math.isnan(run.utilisation("spot"))
    assert math.isnan(run.evaluations[0].usd)
    assert run.evaluations[0].reward == 0.5


def test_the_ledger_takes_prices_from_the_configuration(tmp_path: Path) -> None:
    assert ledger_of(PRICES).usd_per_hour("reserved") == 72
    assert ledger_of(PRICES | {"cluster.reserved_gpus": "4"}).usd_per_hour("reserved") == 144
    table = tmp_path / "prices.csv"
    table.write_text("zone,reserved_usd_per_gpu_hour,spot_usd_per_gpu_hour\neast,5,1\n")
    listed = {"prices._target_": "src.spot.prices.read_prices", "prices.path": str(table), "market.zone": "east"}
    assert ledger_of(PRICES | listed).usd_per_hour("spot") == 1
    catalog = tmp_path / "catalog.csv"
    catalog.write_text("gpu,count,zone,on_demand_usd_h,spot_usd_h,what\nH100,8,east,80,16,whole machine\n")
    listed |= {"prices._target_": "src.spot.prices.read_catalog", "prices.path": str(catalog), "prices.gpu": "H100"}
    assert ledger_of(PRICES | listed).usd_per_hour("reserved") == 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prices._target_": "src.spot.prices.read_prices"}, "no prices: the configuration lacks prices.path"),
        ({"trainer.devices": "auto"}, "invalid literal"),
        ({"trainer.devices": "0"}, "reserved_gpus must be at least 1"),
        ({"prices.spot_usd_per_gpu_hour": "-1"}, "spot_usd_per_gpu_hour must be finite and not negative"),
    ],
)
def test_prices_that_cannot_be_are_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ledger_of(PRICES | changes)


def opened(iteration: int, prompts: int = 3) -> dict[str, Any]:
    return {"time_s": 0.0, "kind": "exploration_opened", "iteration": iteration, "prompts": prompts}


def asked(iteration: int, *seeds: tuple[int, int, int]) -> dict[str, Any]:
    return {"time_s": 0.0, "kind": "explore_asked", "iteration": iteration, "seeds": [list(row) for row in seeds]}


def stopped(reason: str) -> dict[str, Any]:
    return {"time_s": 0.0, "kind": "explore_stopped", "iteration": 1, "reason": reason}


def test_choices_add_up_by_prompt_and_by_steps() -> None:
    made = choices(
        [
            opened(1),
            asked(1, (0, 4, 10), (1, 2, 5)),
            asked(1, (0, 4, 5)),
            stopped("time is up"),
            opened(2),
            asked(2, (0, 1, 10), (1, 2, 10), (2, 3, 10)),
            stopped("time is up"),
            stopped("nothing pays"),
            opened(3),
        ]
    )
    assert made.seeds == ((1, 10 / 3), (2, 2), (3, 0))
    assert made.least == ((1, 0), (2, 1), (3, 0))
    assert made.most == ((1, 8), (2, 3), (3, 0))
    assert made.by_steps == {5: ((1, 6), (2, 0), (3, 0)), 10: ((1, 4), (2, 6), (3, 0))}
    assert made.mean_steps == ((1, 7), (2, 10))
    assert made.reasons == {"time is up": 2, "nothing pays": 1}


def test_of_a_batch_that_was_explored_twice_the_last_counts() -> None:
    made = choices([opened(1), asked(1, (0, 9, 10)), opened(1), asked(1, (0, 3, 10))])
    assert made.seeds == ((1, 1),)


def test_a_planner_that_never_asks_has_no_curve() -> None:
    made = choices([opened(1), stopped("exploration is off")])
    assert (made.seeds, made.by_steps, made.mean_steps) == ((), {}, ())
    assert made.reasons == {"exploration is off": 1}
