import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Normal

from src.models.schedule import Schedule, flow_match_schedule
from src.models.steps import CPS, ODE, DanceSDE, FlowSDE, StepRule, Transition, gaussian_kl

LEVELS = st.floats(0.05, 1.0)
RULES: list[StepRule] = [FlowSDE(0.7), CPS(0.7), DanceSDE(0.3)]


def latents(seed: int, batch: int = 3) -> torch.Tensor:
    return torch.randn(batch, 4, 5, generator=torch.Generator().manual_seed(seed))


def taken(rule: StepRule, schedule: Schedule, steps: list[int]) -> Transition:
    """The transitions of one sample per step index, from the same latents and velocities."""
    x, v = latents(0, 1).expand(len(steps), -1, -1), latents(1, 1).expand(len(steps), -1, -1)
    return rule.transition(x, v, *schedule.at(torch.tensor(steps)), schedule.guard)


@given(level=LEVELS, steps=st.integers(2, 30), shift=st.floats(0.5, 6))
def test_flow_sde_first_step(level: float, steps: int, shift: float) -> None:
    """At sigma = 1: std = a, mean = (1 - a^2/2) x + v dt."""
    schedule = flow_match_schedule(steps, shift=shift)
    first = taken(FlowSDE(level), schedule, [0])
    dt = schedule.sigmas[1] - 1
    assert first.std_B.item() == pytest.approx(level, rel=1e-5)
    expected = (1 - level**2 / 2) * latents(0, 1) + latents(1, 1) * dt
    torch.testing.assert_close(first.mean_BLC, expected, rtol=1e-5, atol=1e-5)


@given(level=LEVELS, sigma=st.floats(0.05, 0.95), fraction=st.floats(0.0, 0.95))
def test_flow_sde_against_the_formula_in_float64(level: float, sigma: float, fraction: float) -> None:
    sigma_next = sigma * fraction
    x, v = latents(0), latents(1)
    moved = FlowSDE(level).transition(x, v, torch.full((3,), sigma), torch.full((3,), sigma_next), 0.97)
    dt, diffusion = sigma_next - sigma, level * math.sqrt(sigma / (1 - sigma))
    x64, v64 = x.double(), v.double()
    x0, eps = x64 - sigma * v64, x64 + (1 - sigma) * v64
    # The same drift, written with the score -eps / sigma of the marginal: f = v + sigma_t^2 / 2 eps / sigma.
    mean = x64 + (v64 + diffusion**2 / (2 * sigma) * eps) * dt
    torch.testing.assert_close(moved.mean_BLC.double(), mean, rtol=1e-4, atol=1e-4)
    assert moved.std_B.tolist() == pytest.approx([diffusion * math.sqrt(-dt)] * 3, rel=1e-4, abs=1e-6)
    torch.testing.assert_close((1 - sigma) * x0 + sigma * eps, x64)


@given(eta=LEVELS, sigma=st.floats(0.05, 1.0), fraction=st.floats(0.0, 0.95))
def test_dance_sde_against_the_formula_in_float64(eta: float, sigma: float, fraction: float) -> None:
    """The drift is the ODE's minus eta^2 / 2 times the score, which is -(x - (1 - sigma) x0) / sigma^2."""
    sigma_next = sigma * fraction
    x, v = latents(0), latents(1)
    moved = DanceSDE(eta).transition(x, v, torch.full((3,), sigma), torch.full((3,), sigma_next), 0.97)
    dt = sigma_next - sigma
    x64, v64 = x.double(), v.double()
    score = -(x64 - (1 - sigma) * (x64 - sigma * v64)) / sigma**2
    mean = x64 + (v64 - eta**2 / 2 * score) * dt
    torch.testing.assert_close(moved.mean_BLC.double(), mean, rtol=1e-4, atol=1e-3)
    assert moved.std_B.tolist() == pytest.approx([eta * math.sqrt(-dt)] * 3, rel=1e-4, abs=1e-6)


def test_dance_sde_keeps_the_marginals_of_flow_sde_where_their_diffusions_agree() -> None:
    """Flow-SDE's diffusion is a sqrt(sigma / (1 - sigma)): with eta equal to it both rules are one."""
    sigma, sigma_next = torch.full((3,), 0.5), torch.full((3,), 0.4)
    flow, dance = (
        rule.transition(latents(0), latents(1), sigma, sigma_next, 0.9) for rule in (FlowSDE(0.6), DanceSDE(0.6))
    )
    torch.testing.assert_close(dance.mean_BLC, flow.mean_BLC)
    torch.testing.assert_close(dance.std_B, flow.std_B)


@given(level=LEVELS, step=st.integers(0, 8))
def test_cps_keeps_the_coefficients(level: float, step: int) -> None:
    """The mean's noise part and std have the norm sigma' of a sample at that noise level."""
    schedule = flow_match_schedule(9, shift=2.0)
    sigma, sigma_next = schedule.sigmas[step], schedule.sigmas[step + 1]
    x0, eps = latents(2), latents(3)
    x, v = (1 - sigma) * x0 + sigma * eps, eps - x0
    moved = CPS(level).transition(x, v, *schedule.at(torch.full((3,), step)), schedule.guard)
    kept = math.sqrt(max(sigma_next**2 - moved.std_B[0].item() ** 2, 0.0))
    assert moved.std_B[0].item() == pytest.approx(sigma_next * math.sin(level * math.pi / 2), abs=1e-6)
    torch.testing.assert_close(moved.mean_BLC, (1 - sigma_next) * x0 + kept * eps, rtol=1e-4, atol=3e-4)


def test_without_noise_flow_sde_is_euler_exactly_and_cps_up_to_rounding() -> None:
    schedule = flow_match_schedule(6)
    steps = list(range(6))
    euler = taken(ODE(), schedule, steps)
    sde, cps = taken(FlowSDE(0.0), schedule, steps), taken(CPS(0.0), schedule, steps)
    assert torch.equal(sde.mean_BLC, euler.mean_BLC)
    torch.testing.assert_close(cps.mean_BLC, euler.mean_BLC)
    for moved in (euler, sde, cps):
        assert torch.equal(moved.std_B, torch.zeros(6))
        assert torch.equal(moved.sample(latents(4, 6)), moved.mean_BLC)


@pytest.mark.parametrize("rule", [ODE(), FlowSDE(0.0), CPS(0.0)])
def test_a_step_without_noise_has_no_log_probability(rule: StepRule) -> None:
    moved = taken(rule, flow_match_schedule(4), [1])
    with pytest.raises(ValueError, match="no log-probability"):
        rule.log_prob(moved.mean_BLC, moved)


def test_flow_sde_log_prob_is_the_mean_normal_log_density() -> None:
    moved = taken(FlowSDE(0.7), flow_match_schedule(6), [0, 3, 5])
    x_next = moved.sample(latents(5))
    density = Normal(moved.mean_BLC, moved.std_B[:, None, None]).log_prob(x_next)
    torch.testing.assert_close(FlowSDE(0.7).log_prob(x_next, moved), density.mean(dim=(1, 2)))


def test_cps_log_prob_is_minus_the_mean_square() -> None:
    moved = taken(CPS(0.7), flow_match_schedule(6), [0, 3, 5])
    noise = latents(5)
    expected = -(moved.std_B**2) * (noise**2).mean(dim=(1, 2))
    torch.testing.assert_close(CPS(0.7).log_prob(moved.sample(noise), moved), expected, rtol=1e-4, atol=1e-7)


@given(level=LEVELS, size=st.floats(0, 0.1))
def test_log_ratio_of_a_moved_mean(level: float, size: float) -> None:
    """log-ratio of the same x' = mean(eps D / std) - mean(D^2) / (2 std^2), with D = new mean - old mean."""
    rule = FlowSDE(level)
    old = taken(rule, flow_match_schedule(6), [0, 2, 4])
    noise, moved_by = latents(5), size * latents(6)
    x_next = old.sample(noise)
    new = Transition(old.mean_BLC + moved_by, old.std_B)
    std = old.std_B[:, None, None]
    expected = (noise * moved_by / std - moved_by**2 / (2 * std**2)).mean(dim=(1, 2))
    actual = rule.log_prob(x_next, new) - rule.log_prob(x_next, old)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)


def test_the_last_cps_step_has_ratio_1_and_no_gradient() -> None:
    schedule = flow_match_schedule(5)
    x, v = latents(0), latents(1).requires_grad_()
    last = CPS(0.7).transition(x, v, *schedule.at(torch.full((3,), 4)), schedule.guard)
    log_prob = CPS(0.7).log_prob(last.sample(latents(2)), last)
    log_prob.sum().backward()
    assert torch.equal(last.std_B, torch.zeros(3))
    assert torch.equal(log_prob, torch.zeros(3))
    assert torch.equal(v.grad, torch.zeros_like(v))


@pytest.mark.parametrize("rule", RULES)
def test_only_the_mean_takes_gradient(rule: StepRule) -> None:
    schedule = flow_match_schedule(5)
    v = latents(1).requires_grad_()
    moved = rule.transition(latents(0), v, *schedule.at(torch.full((3,), 2)), schedule.guard)
    x_next = (moved.mean_BLC + moved.std_B[:, None, None]).detach().requires_grad_()
    rule.log_prob(x_next, moved).sum().backward()
    assert x_next.grad is None
    assert v.grad.abs().sum() > 0


@pytest.mark.parametrize("rule", [*RULES, ODE()])
def test_steps_mixed_in_a_batch_equal_steps_alone(rule: StepRule) -> None:
    schedule = flow_match_schedule(5)
    mixed = taken(rule, schedule, [0, 3, 1])
    for row, step in enumerate([0, 3, 1]):
        alone = taken(rule, schedule, [step])
        assert torch.equal(mixed.mean_BLC[row], alone.mean_BLC[0])
        assert torch.equal(mixed.std_B[row], alone.std_B[0])


def test_steps_compute_in_fp32_whatever_the_latents() -> None:
    schedule = flow_match_schedule(5)
    x, v = latents(0).bfloat16(), latents(1).bfloat16()
    for rule in (*RULES, ODE()):
        moved = rule.transition(x, v, *schedule.at(torch.full((3,), 2)), schedule.guard)
        wide = rule.transition(x.float(), v.float(), *schedule.at(torch.full((3,), 2)), schedule.guard)
        assert moved.mean_BLC.dtype is torch.float32
        assert torch.equal(moved.mean_BLC, wide.mean_BLC)


def test_kl_is_that_of_the_normal_distributions() -> None:
    moved = taken(FlowSDE(0.7), flow_match_schedule(6), [0, 3, 5])
    reference = moved.mean_BLC + 0.1 * latents(7)
    std = moved.std_B[:, None, None]
    kl = torch.distributions.kl_divergence(Normal(moved.mean_BLC, std), Normal(reference, std))
    torch.testing.assert_close(gaussian_kl(moved, reference), kl.mean(dim=(1, 2)))
    assert torch.equal(gaussian_kl(moved, moved.mean_BLC), torch.zeros(3))


def test_noise_levels_are_checked() -> None:
    for level in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"FlowSDE\.noise_level"):
            FlowSDE(level)
        with pytest.raises(ValueError, match=r"DanceSDE\.noise_level"):
            DanceSDE(level)
    with pytest.raises(ValueError, match=r"CPS\.noise_level must lie in \[0, 1\], got 1\.2"):
        CPS(1.2)
