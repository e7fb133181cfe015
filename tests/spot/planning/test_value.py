"""From contrast to learning to usd."""

from __future__ import annotations

import pytest

from src.spot.planning.value import LearningValue, progress_usd


def test_progress_rises_and_saturates() -> None:
    learning = LearningValue(gain=0.8, saturation=3.0)
    assert [learning.progress(v) for v in (0.5, 1.0, 2.0, 3.0, 9.0)] == pytest.approx([1.0, 1.0, 1.8, 2.6, 2.6])
    assert [learning.slope(v) for v in (0.5, 2.9, 3.0, 9.0)] == [0.8, 0.8, 0.0, 0.0]


def test_progress_is_worth_what_is_paid_for_it() -> None:
    assert progress_usd(1.0, iteration_usd=2.0, exploration_usd=0.0) == 2.0
    assert progress_usd(2.0, iteration_usd=2.0, exploration_usd=1.0) == 1.5


@pytest.mark.parametrize("settings", [{"gain": 0.0}, {"saturation": 1.0}])
def test_impossible_values_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"planner.learning.{next(iter(settings))}"):
        LearningValue(**settings)
