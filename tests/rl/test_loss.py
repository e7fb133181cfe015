import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from src.rl.loss import ClippedLoss, GuardedRatio, LossSums, StepTerms

PAIRS, STEPS = 24, 5


def problem(seed: int = 0) -> dict[str, Tensor]:
    """A model that is linear in 7 weights: pairs' log-probabilities and KL depend on them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "weights": (0.01 * normal(7)).requires_grad_(),
        "features": normal(PAIRS, 7),
        "old": 0.01 * normal(PAIRS),
        "advantages": normal(PAIRS),
        "steps": torch.randint(0, STEPS, (PAIRS,), generator=generator),
    }


def loss_of(rows: Tensor | slice, loss: ClippedLoss, given: dict[str, Tensor]) -> tuple[Tensor, LossSums]:
    log_probs = given["features"][rows] @ given["weights"]
    return loss(
        log_probs_K=log_probs,
        old_log_probs_K=given["old"][rows],
        advantages_K=given["advantages"][rows],
        steps_K=given["steps"][rows],
        total_steps=STEPS,
        kl_K=(log_probs - 0.3) ** 2,
    )


def gradient(given: dict[str, Tensor]) -> Tensor:
    found = given["weights"].grad
    assert found is not None
    given["weights"].grad = None
    return found


def test_loss_and_diagnostics_equal_the_formula_pair_by_pair():
    given, c, beta = problem(), 0.02, 0.5
    total, sums = loss_of(slice(None), ClippedLoss(clip_range=c, kl_weight=beta), given)
    expected, ratios = 0.0, []
    for k in range(PAIRS):
        log_prob = float(given["features"][k] @ given["weights"].detach())
        advantage, ratio = float(given["advantages"][k]), math.exp(log_prob - float(given["old"][k]))
        expected += max(-advantage * ratio, -advantage * min(max(ratio, 1 - c), 1 + c))
        expected += beta * (log_prob - 0.3) ** 2
        ratios.append(ratio)
    assert float(total.detach()) == pytest.approx(expected, rel=1e-12)
    means = sums.means()
    low, high = sum(r < 1 - c for r in ratios), sum(r > 1 + c for r in ratios)
    assert 0 < low < PAIRS, "the problem must clip some pairs, not all"
    assert 0 < high < PAIRS
    assert means["ratio"] == pytest.approx(sum(ratios) / PAIRS, rel=1e-12)
    assert means["clipped_low"] == pytest.approx(low / PAIRS)
    assert means["clipped_high"] == pytest.approx(high / PAIRS)
    assert means["abs_log_ratio"] == pytest.approx(sum(abs(math.log(r)) for r in ratios) / PAIRS, rel=1e-9)
    assert means["policy_loss"] + beta * means["kl"] == pytest.approx(expected / PAIRS, rel=1e-12)


@given(st.permutations(range(PAIRS)), st.lists(st.integers(1, PAIRS - 1), max_size=4))
def test_micro_batches_accumulate_the_gradient_of_one_shot(order: list[int], cuts: list[int]):
    """However the pairs are split and ordered: sum / global count, in float64 to 1e-12."""
    given, loss = problem(), ClippedLoss(clip_range=0.02, kl_weight=0.1)
    total, sums = loss_of(slice(None), loss, given)
    (total / PAIRS).backward()
    one_shot = gradient(given)
    edges = [0, *sorted(set(cuts)), PAIRS]
    accumulated = LossSums.zeros(STEPS)
    for start, end in pairwise(edges):
        part, part_sums = loss_of(torch.tensor(order[start:end]), loss, given)
        (part / PAIRS).backward()
        accumulated += part_sums
    torch.testing.assert_close(gradient(given), one_shot, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(accumulated.sums_XT, sums.sums_XT, rtol=1e-12, atol=1e-12)


def test_ranks_with_unequal_shares_give_the_gradient_of_one():
    """Ranks average their gradients: scaling each sum by dp / global count undoes that, for any shares."""
    given, loss = problem(), ClippedLoss(clip_range=0.02)
    (loss_of(slice(None), loss, given)[0] / PAIRS).backward()
    one_shot = gradient(given)
    ranks = []
    for rows in (slice(0, 5), slice(5, 24)):
        (loss_of(rows, loss, given)[0] * 2 / PAIRS).backward()
        ranks.append(gradient(given))
    torch.testing.assert_close((ranks[0] + ranks[1]) / 2, one_shot, rtol=1e-12, atol=1e-12)


def test_before_the_first_update_ratio_is_exactly_one_and_nothing_is_clipped():
    given = problem()
    given["old"] = (given["features"] @ given["weights"]).detach()
    total, sums = loss_of(slice(None), ClippedLoss(clip_range=1e-5), given)
    total.backward()
    means = sums.means()
    assert (means["ratio"], means["abs_log_ratio"]) == (1.0, 0.0)
    assert (means["clipped_low"], means["clipped_high"]) == (0.0, 0.0)
    expected = -(given["advantages"][:, None] * given["features"]).sum(dim=0)  # policy gradient: -A grad log p
    torch.testing.assert_close(gradient(given), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "slope"),
    [
        (0.1, 1.0, 0.0),  # already more likely than the clip range allows: no further reward for it
        (0.1, -1.0, math.exp(0.1)),
        (-0.1, 1.0, -math.exp(-0.1)),
        (-0.1, -1.0, 0.0),
        (0.001, 1.0, -math.exp(0.001)),
        (0.1, 0.0, 0.0),
    ],
)
def test_clipping_stops_the_gradient_only_outward(log_ratio: float, advantage: float, slope: float):
    log_prob = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    total, _ = ClippedLoss(clip_range=0.01)(
        log_probs_K=log_prob,
        old_log_probs_K=torch.zeros(1, dtype=torch.float64),
        advantages_K=torch.tensor([advantage], dtype=torch.float64),
        steps_K=torch.tensor([0]),
        total_steps=1,
    )
    total.backward()
    assert float(log_prob.grad) == pytest.approx(slope, abs=1e-12)


def test_kl_has_a_gradient():
    given = problem()
    given["advantages"] = torch.zeros(PAIRS, dtype=torch.float64)
    loss_of(slice(None), ClippedLoss(clip_range=0.02, kl_weight=0.7), given)[0].backward()
    residual = given["features"] @ given["weights"].detach() - 0.3
    expected = 0.7 * 2 * (residual[:, None] * given["features"]).sum(dim=0)
    torch.testing.assert_close(gradient(given), expected, rtol=1e-12, atol=1e-12)


def test_a_kl_without_gradient_or_without_value_is_refused():
    loss = ClippedLoss(clip_range=0.02, kl_weight=0.1)
    pairs = {
        "log_probs_K": torch.zeros(2, requires_grad=True),
        "old_log_probs_K": torch.zeros(2),
        "advantages_K": torch.ones(2),
        "steps_K": torch.tensor([0, 1]),
        "total_steps": 2,
    }
    with pytest.raises(ValueError, match="kl_K carries no gradient"):
        loss(**pairs, kl_K=torch.ones(2))
    with pytest.raises(ValueError, match=r"kl_K is needed for ClippedLoss\.kl_weight=0\.1"):
        loss(**pairs)


def test_the_old_policy_takes_no_gradient():
    given = problem()
    given["old"].requires_grad_()
    loss_of(slice(None), ClippedLoss(clip_range=0.02), given)[0].backward()
    assert given["old"].grad is None


def test_diagnostics_by_step_and_over_micro_batches():
    sums = LossSums.zeros(3)
    loss = ClippedLoss(clip_range=0.1)
    for step, log_ratio in [(0, 0.0), (2, 0.5), (2, -0.25)]:
        sums += loss(
            log_probs_K=torch.tensor([log_ratio]),
            old_log_probs_K=torch.zeros(1),
            advantages_K=torch.ones(1),
            steps_K=torch.tensor([step]),
            total_steps=3,
        )[1]
    assert sums.pairs == 3
    assert sums.per_step("abs_log_ratio") == {0: 0.0, 2: 0.375}
    assert sums.per_step("clipped_high") == {0: 0.0, 2: 0.5}
    assert sums.means()["clipped_low"] == pytest.approx(1 / 3)


def test_no_pairs_have_no_means():
    assert all(math.isnan(value) for value in LossSums.zeros(4).means().values())
    assert LossSums.zeros(4).per_step("ratio") == {}


@pytest.mark.parametrize(("field", "value"), [("clip_range", 0.0), ("clip_range", 1.0), ("kl_weight", -0.1)])
def test_settings_are_checked(field: str, value: float):
    with pytest.raises(ValueError, match=rf"ClippedLoss\.{field} must .*, got {value}"):
        ClippedLoss(**{"clip_range": 0.1, field: value})


def test_the_guarded_ratio_equals_the_formula_pair_by_pair():
    generator = torch.Generator().manual_seed(1)
    mean, old_mean, noise = torch.randn(3, PAIRS, 40, generator=generator, dtype=torch.float64)
    mean = old_mean + 0.02 * mean
    std = torch.linspace(0.05, 0.9, PAIRS, dtype=torch.float64)
    duration = torch.linspace(0.01, 0.3, PAIRS, dtype=torch.float64)
    x = old_mean + std[:, None] * noise
    advantages, c = torch.randn(PAIRS, generator=generator, dtype=torch.float64), 0.002

    def log_prob(centre: Tensor) -> Tensor:
        return -((x - centre) ** 2).mean(dim=1) / (2 * std**2) - std.log()

    total, sums = ClippedLoss(clip_range=c, ratio=GuardedRatio())(
        log_probs_K=log_prob(mean),
        old_log_probs_K=log_prob(old_mean),
        advantages_K=advantages,
        steps_K=torch.zeros(PAIRS, dtype=torch.long),
        total_steps=1,
        terms=StepTerms(std, duration, ((mean - old_mean) ** 2).mean(dim=1)),
    )
    ratios = ((mean - old_mean) * noise).mean(dim=1).exp()  # what is left of the formula: the noise's own direction
    expected = sum(
        max(-float(a) * float(r), -float(a) * min(max(float(r), 1 - c), 1 + c)) / float(d)
        for a, r, d in zip(advantages, ratios, duration, strict=True)
    )
    assert float(total) == pytest.approx(expected, rel=1e-12)
    assert sums.means()["ratio"] == pytest.approx(float(ratios.mean()), rel=1e-12)
    assert 0 < sums.means()["clipped_low"] < 1
    assert 0 < sums.means()["clipped_high"] < 1
