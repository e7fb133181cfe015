"""Forecasts of times and speeds."""

from __future__ import annotations

import math

import pytest

from src.core.seeds import generator
from src.spot.planning.outlook import Forecast, Speeds
from src.spot.planning.protocol import Worker


def test_nothing_is_expected_before_the_first_observation() -> None:
    assert Forecast().expected is None
    assert Forecast().at_least(0.01) is None
    assert Speeds().step_s("a") is None


def test_values_that_cannot_be_are_passed_over() -> None:
    forecast = Forecast()
    for value in (0.0, -1.0, math.nan, math.inf):
        forecast.observe(value)
    assert forecast.expected is None


def test_the_level_follows_in_logarithms() -> None:
    forecast = Forecast(discount=0.5)
    forecast.observe(100.0)
    forecast.observe(400.0)
    assert forecast.expected == pytest.approx(200.0)


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
def test_the_bound_is_broken_about_as_often_as_it_may(noise: float) -> None:
    draw, forecast, broken = generator("forecast", str(noise)), Forecast(), 0
    for _ in range(3000):
        value = 100 * math.exp(noise * draw.gauss(0, 1))
        least = forecast.at_least(0.01)
        broken += least is not None and value < least
        forecast.observe(value)
    assert broken <= 60
    assert forecast.at_least(0.01) > 100 * math.exp(-5 * noise)  # and not by promising nothing


def test_a_new_worker_is_like_the_others() -> None:
    speeds = Speeds()
    speeds.observe("a", 10, 20.0)
    assert speeds.step_s("a") == speeds.step_s("new") == pytest.approx(2.0)


def test_a_worker_that_left_is_forgotten() -> None:
    speeds = Speeds(discount=0.0)
    speeds.observe("a", 10, 20.0)
    speeds.observe("b", 10, 40.0)
    speeds.keep((Worker("b", 4),))
    assert speeds.step_s("a") == pytest.approx(4.0)
