import io
from typing import Any

from rich.console import Console

from src.app.progress import Progress, RunState
from src.spot.cost import Ledger
from src.spot.prices import FixedPrices


def ledger() -> Ledger:
    return Ledger(prices=FixedPrices(reserved_usd_per_gpu_hour=360.0, spot_usd_per_gpu_hour=0.0))


def event(time_s: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"time_s": time_s, "kind": kind, **fields}


def rollout(start_s: float, end_s: float, iteration: int) -> dict[str, Any]:
    return event(end_s, "phase", name="rollout", iteration=iteration, start_s=start_s, end_s=end_s)


NEWS = [
    event(0, "run_started", iteration=0),
    event(1, "worker_joined", worker="spot-a-0.0", role="spot"),
    event(1, "worker_joined", worker="spot-a-1.0", role="spot"),
    event(1, "worker_joined", worker="reserved-a-0.0", role="reserved"),
    {"step": 0, "time_s": 2, "eval/reward": 0.4, "eval/judge": 0.35},
    rollout(2, 5, 0),
    {"step": 1, "time_s": 8, "train/reward": 0.41},
    event(8, "explored", iteration=1, results=[0] * 1024),
    event(9, "worker_lost", worker="spot-a-1.0", reason="killed", requests=3),
    rollout(8, 11, 1),
    {"step": 2, "time_s": 14, "train/reward": 0.43},
    {"step": 2, "time_s": 15, "eval/reward": 0.45, "eval/judge": float("nan")},
]


def show(console: Console, total: int = 4) -> None:
    progress = Progress(total=total, ledger=ledger(), console=console)
    progress.start()
    for row in NEWS:
        (progress.on_event if "kind" in row else progress.on_metrics)(row)
    progress.stop()


def test_without_a_terminal_there_is_a_line_per_iteration_and_evaluation() -> None:
    out = io.StringIO()
    show(Console(file=out, width=200))
    assert out.getvalue().splitlines() == [
        "evaluation after 0: held-out 0.400  judge 0.350",
        "iteration 1/4  held-out 0.400  train 0.410  2 spot  0 explored  0.5000 usd  18.0 s left",
        "spot-a-1.0 was lost (killed), 3 samples go back",
        "iteration 2/4  held-out 0.400  train 0.430  1 spot  1,024 explored  1.1000 usd  12.0 s left",
        "evaluation after 2: held-out 0.450",
    ]


def test_on_a_terminal_there_is_a_bar_below_the_lasting_lines() -> None:
    out = io.StringIO()
    show(Console(file=out, width=140, force_terminal=True, color_system=None))
    text = out.getvalue()
    assert "2/4" in text
    assert "held-out 0.450  train 0.430  1 spot  1,024 explored" in text
    assert "spot-a-1.0 was lost (killed)" in text
    assert "iteration 2/4" not in text


def test_a_resumed_run_starts_where_it_stopped_and_has_no_pace_yet() -> None:
    state = RunState(total=4, ledger=ledger())
    for row in NEWS:
        (state.on_event if "kind" in row else state.on_metrics)(row)
    state.on_event(event(20, "run_started", iteration=1))
    assert (state.done, state.spot, state.left_s) == (1, set(), None)
    state.on_event(rollout(30, 31, 1))
    state.on_metrics({"step": 2, "time_s": 35, "train/reward": 0.5})
    assert state.left_s == 5 / 1 * 2


def test_nothing_is_left_at_the_end() -> None:
    out = io.StringIO()
    show(Console(file=out, width=200), total=2)
    assert "iteration 2/2  held-out 0.400  train 0.430  1 spot  1,024 explored  1.1000 usd\n" in out.getvalue()
