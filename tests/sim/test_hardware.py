"""The arithmetic of a profile; test_published.py compares the shipped ones with published figures."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.sim.hardware import Figure, profile
from tests.sim.profiles import VALUES, made


def test_denoising_is_linear_in_images_and_steps_and_guidance_doubles_it():
    assert made().denoise_s(3, 10, guidance=False) == 15.0
    assert made().denoise_s(3, 10, guidance=True) == 30.0
    assert made().denoise_s(1.5, 2, guidance=False) == 1.5


def test_sharing_a_sequence_saves_what_was_measured_and_three_lies_between():
    hardware = made()
    assert [hardware.sp_speedup(degree) for degree in (1, 2, 4)] == pytest.approx([1.0, 1.6, 2.5])
    assert hardware.sp_speedup(3) == pytest.approx(1.6 * (2.5 / 1.6) ** (math.log2(3) - 1))
    assert hardware.denoise_s(1, 16, degree=2, guidance=False) == 5.0


@pytest.mark.parametrize("degree", [0, 5, 8])
def test_a_degree_of_which_nothing_is_known_is_refused(degree):
    with pytest.raises(ValueError, match=rf"degree must be within 1..4, got {degree}"):
        made().denoise_s(1, 1, degree=degree, guidance=False)


def test_training_divides_by_gpus_and_each_doubling_beyond_the_measured_number_costs():
    hardware = made()
    assert hardware.train_s(8, 3, gpus=4, guidance=False) == 12.0
    assert hardware.train_s(8, 3, gpus=4, guidance=True) == 24.0
    assert hardware.train_s(8, 3, gpus=1, guidance=False) == 48.0
    assert hardware.train_s(8, 3, gpus=8, guidance=False) == pytest.approx(6.6)
    assert hardware.train_s(8, 3, gpus=16, guidance=False) == pytest.approx(3.63)
    with pytest.raises(ValueError, match="gpus must be at least 1, got 0"):
        hardware.train_s(8, 3, gpus=0, guidance=False)


def test_the_other_operations_take_their_figure():
    hardware = made()
    assert hardware.decode_score_s(6) == 1.5
    assert (hardware.publish_s, hardware.load_s, hardware.regroup_s) == (1.0, 2.0, 3.0)
    assert (hardware.cold_start_s, hardware.commit_s) == (100.0, 0.125)


def test_scaling_moves_the_named_figures_alone_and_keeps_their_sources():
    hardware = made()
    moved = hardware.scaled(cold_start=2, train=0.5)
    assert (moved.cold_start.value, moved.train.value) == (200.0, 1.0)
    assert moved.cold_start.source == "of cold_start"
    assert moved.scaled(cold_start=0.5, train=2) == hardware
    with pytest.raises(ValueError, match="no figure is called warm_start"):
        hardware.scaled(warm_start=2)


def test_only_assumed_figures_are_offered_to_a_sensitivity_sweep():
    assert made().assumed == tuple(name for name in VALUES if not name.startswith("sp"))


def test_the_table_has_a_row_for_every_figure():
    rows = made().table()
    assert {row.name: row.value for row in rows} == VALUES
    assert rows[0] == ("denoise", 0.5, "GPU s / image / step", "assumed", "of denoise")
    assert all(row.unit for row in rows)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"value": 0, "tag": "assumed", "source": "x"}, "value must be positive and finite, got 0"),
        ({"value": math.inf, "tag": "assumed", "source": "x"}, "value must be positive and finite, got inf"),
        ({"value": 1, "tag": "guessed", "source": "x"}, "tag must be one of published, derived, assumed"),
        ({"value": 1, "tag": "assumed", "source": " "}, "source must say"),
        ({"value": 1, "tag": "assumed"}, "source"),
    ],
)
def test_a_figure_without_a_reason_is_refused_by_name(parts, message):
    figures = {name: {"value": value, "tag": "assumed", "source": "x"} for name, value in VALUES.items()}
    with pytest.raises(ValueError, match=f"figure load of profile made: .*{message}"):
        profile(name="made", figures={**figures, "load": parts})


def test_a_profile_has_all_figures_and_no_others():
    figures = {name: {"value": value, "tag": "assumed", "source": "x"} for name, value in VALUES.items()}
    with pytest.raises(ValueError, match="profile made must have the figures load"):
        profile(name="made", figures={name: parts for name, parts in figures.items() if name != "load"})
    with pytest.raises(ValueError, match="profile made has unknown figures lode"):
        profile(name="made", figures={**figures, "lode": figures["load"]})


@given(degree=st.integers(1, 3), value=st.floats(0.1, 1.0))
def test_more_gpus_per_image_are_never_slower_and_never_better_than_linear(degree, value):
    hardware = made(sp2_latency=8 * max(value, 0.5), sp4_latency=8 * max(value, 0.5) * 0.5)
    assert hardware.sp_speedup(degree) <= hardware.sp_speedup(degree + 1) * (1 + 1e-12)
    assert hardware.sp_speedup(degree + 1) <= degree + 1 + 1e-9


def test_a_figure_is_what_it_was_given():
    assert Figure(value=2.0, tag="derived", source="a paper") == Figure(value=2.0, tag="derived", source="a paper")
    with pytest.raises(AttributeError):
        Figure(value=2.0, tag="derived", source="a paper").value = 3.0  # type: ignore[misc]
