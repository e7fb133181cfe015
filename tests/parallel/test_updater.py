import json
import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from src.core.types import Snapshot
from src.parallel.updater import LocalUpdater, flatten_optimizer, restore_optimizer


def updater_for(weights: Tensor, *, lr: float = 1.0, grad_clip: float = 1e9, warmup_updates: int = 0) -> LocalUpdater:
    return LocalUpdater(optimizer=torch.optim.SGD([weights], lr=lr), grad_clip=grad_clip, warmup_updates=warmup_updates)


def apply_gradient(updater: LocalUpdater, weights: Tensor, gradient: list[float], update: int = 0) -> float:
    def closure() -> float:
        loss = (weights * torch.tensor(gradient, dtype=weights.dtype)).sum()
        updater.backward(loss)
        return float(loss.detach())

    return updater.apply(update, closure)[0]


def test_a_small_gradient_is_applied_as_it_is():
    weights = nn.Parameter(torch.zeros(2))
    assert apply_gradient(updater_for(weights), weights, [3.0, 4.0]) == 5.0
    assert weights.tolist() == [-3.0, -4.0]
    assert weights.grad is None


def test_a_large_gradient_is_clipped_and_its_norm_before_that_returned():
    weights = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    assert apply_gradient(updater_for(weights, grad_clip=1.0), weights, [3.0, 4.0]) == 5.0
    torch.testing.assert_close(weights.detach(), torch.tensor([-0.6, -0.8], dtype=torch.float64), rtol=1e-6, atol=0)


def test_the_norm_is_over_all_parameters():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    updater = LocalUpdater(optimizer=torch.optim.SGD([a, b], lr=1.0), grad_clip=1e9, warmup_updates=0)

    def closure() -> float:
        updater.backward(3 * a.sum() + 4 * b.sum())
        return 0.0

    assert updater.apply(0, closure) == (5.0, 0.0)


def test_warm_up_is_a_function_of_the_update():
    """With n = 4: 1/4, 2/4, 3/4, then 1. Resuming at update 2 continues there: nothing is counted inside."""
    moves = []
    for update in (0, 1, 2, 3, 4, 100, 1):
        weights = nn.Parameter(torch.zeros(1))
        apply_gradient(updater_for(weights, lr=2.0, warmup_updates=4), weights, [1.0], update)
        moves.append(-weights.item())
    assert moves == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 1.0]


def test_groups_keep_their_ratio_of_learning_rates():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 1.0}, {"params": [b], "lr": 0.25}])
    updater = LocalUpdater(optimizer=optimizer, grad_clip=1e9, warmup_updates=2)

    def closure() -> float:
        updater.backward(a.sum() + b.sum())
        return 0.0

    for update in range(3):
        updater.apply(update, closure)
    assert (a.item(), b.item()) == (-2.5, -0.625)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(bad: float, caplog: pytest.LogCaptureFixture):
    weights = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weights], lr=0.1)
    updater = LocalUpdater(optimizer=optimizer, grad_clip=1.0, warmup_updates=0)
    apply_gradient(updater, weights, [1.0, 1.0], update=0)
    before, state = weights.detach().clone(), flatten_optimizer(optimizer, {"w": weights})[0]
    with caplog.at_level(logging.WARNING):
        norm = apply_gradient(updater, weights, [1.0, bad], update=7)
    assert not torch.isfinite(torch.tensor(norm))
    assert torch.equal(weights, before)
    assert all(torch.equal(value, state[key]) for key, value in flatten_optimizer(optimizer, {"w": weights})[0].items())
    assert weights.grad is None
    assert updater.skipped == 1
    assert "update 7 skipped: its gradient norm is" in caplog.text
    apply_gradient(updater, weights, [1.0, 1.0], update=8)
    assert not torch.equal(weights, before), "training goes on"
    assert updater.skipped == 1


def test_an_update_without_any_gradient_does_nothing():
    weights = nn.Parameter(torch.ones(2))
    updater = LocalUpdater(
        optimizer=torch.optim.AdamW([weights], lr=0.1, weight_decay=0.5), grad_clip=1.0, warmup_updates=0
    )
    assert updater.apply(0, lambda: 7.0) == (0.0, 7.0)
    assert weights.tolist() == [1.0, 1.0]


def test_a_gradient_left_over_from_before_is_dropped():
    weights = nn.Parameter(torch.zeros(1))
    weights.grad = torch.full((1,), 100.0)
    assert apply_gradient(updater_for(weights), weights, [1.0]) == 1.0


def test_micro_batches_accumulate_to_one_shot():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(12, 5, generator=generator, dtype=torch.float64)

    def trained(parts: list[Tensor]) -> Tensor:
        weights = nn.Parameter(torch.ones(5, dtype=torch.float64))
        updater = updater_for(weights, grad_clip=0.5)

        def closure() -> float:
            for part in parts:
                updater.backward(((part @ weights) ** 2).sum() / len(rows))
            return 0.0

        updater.apply(0, closure)
        return weights.detach()

    torch.testing.assert_close(trained(list(rows.split(5))), trained([rows]), rtol=1e-12, atol=1e-12)


def test_one_process_is_a_group_of_its_own():
    updater = updater_for(nn.Parameter(torch.zeros(1)))
    assert updater.snapshot == Snapshot(rank=0, world=1)


@pytest.mark.parametrize(("field", "value"), [("grad_clip", 0.0), ("warmup_updates", -1)])
def test_settings_are_checked(field: str, value: float):
    with pytest.raises(ValueError, match=rf"{field} must .*, got {value}"):
        updater_for(nn.Parameter(torch.zeros(1)), **{field: value})


# ---------------------------------------------------------------------------- optimizer state

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


class CountingSGD(torch.optim.SGD):
    """Keeps a plain number as state, as some optimizers do."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["steps"] = state.get("steps", 0) + 1
            parameter.data.add_(parameter.grad, alpha=-0.1 / state["steps"])


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, betas=(0.9, 0.99)),
    "amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "counting": CountingSGD,
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, updates: range) -> None:
    updater = LocalUpdater(optimizer=optimizer, grad_clip=1.0, warmup_updates=5)
    for update in updates:
        rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(update))

        def closure(rows: Tensor = rows) -> float:
            updater.backward((model(rows) - rows.sum(dim=1, keepdim=True)).pow(2).mean())
            return 0.0

        updater.apply(update, closure)


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_training_resumes_bit_equal(make_optimizer: MakeOptimizer, tmp_path: Path):
    """Interrupted in the warm-up, through files, into an optimizer that was used for something else."""
    straight = make_model()
    train(straight, make_optimizer(straight.parameters()), range(6))

    first = make_model()
    optimizer = make_optimizer(first.parameters())
    train(first, optimizer, range(3))
    tensors, scalars = flatten_optimizer(optimizer, dict(first.named_parameters()))
    save_file(tensors, tmp_path / "optimizer.safetensors")
    (tmp_path / "optimizer.json").write_text(json.dumps(scalars))

    second = make_model()
    optimizer = make_optimizer(second.parameters())
    train(second, optimizer, range(50, 52))
    second.load_state_dict(first.state_dict())
    restored = (
        load_file(tmp_path / "optimizer.safetensors"),
        json.loads((tmp_path / "optimizer.json").read_text()),
    )
    restore_optimizer(optimizer, dict(second.named_parameters()), *restored)
    train(second, optimizer, range(3, 6))
    for name, expected in straight.state_dict().items():
        assert torch.equal(second.state_dict()[name], expected), name


def test_the_copy_does_not_follow_the_optimizer():
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(1))
    tensors, scalars = flatten_optimizer(optimizer, dict(model.named_parameters()))
    kept = {key: value.clone() for key, value in tensors.items()}
    train(model, optimizer, range(1, 3))
    assert scalars == {}
    assert len(tensors) == 3 * 4
    assert all(torch.equal(tensors[key], kept[key]) for key in kept)


def test_restoring_keeps_the_settings_of_the_configuration():
    model = make_model()
    names = dict(model.named_parameters())
    old = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, old, range(2))
    new = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.5, 0.6))
    restore_optimizer(new, names, *flatten_optimizer(old, names))
    assert (new.param_groups[0]["lr"], new.param_groups[0]["betas"]) == (5e-3, (0.5, 0.6))


def test_state_of_an_unknown_parameter_is_refused_and_nothing_restored():
    model = make_model()
    names = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"exp_avg/0.weight": torch.ones(8, 4), "exp_avg/9.weight": torch.ones(1)}
    with pytest.raises(ValueError, match=r"optimizer state exp_avg/9\.weight belongs to no parameter"):
        restore_optimizer(optimizer, names, state, {})
    assert not optimizer.state


def test_a_parameter_without_name_is_refused():
    model = make_model()
    names = dict(model.named_parameters())
    del names["2.bias"]
    with pytest.raises(ValueError, match=r"names lacks a parameter of the optimizer, of shape \(1,\)"):
        flatten_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), names)
