"""Gradient steps of one training process, and optimizer state that a checkpoint can hold exactly."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from src.core.types import Snapshot

T = TypeVar("T")

log = logging.getLogger(__name__)


class WarmUp:
    """Learning rates that rise linearly over the first updates.

    That of update u is its group's times min(1, (u + 1) / updates): Adam would take its largest steps at first,
    because its second moments have seen little.

    Args:
        optimizer: with the learning rates to warm up to.
        updates: 0 for no warm-up.
    """

    def __init__(self, optimizer: Optimizer, updates: int) -> None:
        if updates < 0:
            raise ValueError(f"warmup_updates must not be negative, got {updates}")
        self._optimizer = optimizer
        self._updates = updates
        self._learning_rates: list[float] = [group["lr"] for group in optimizer.param_groups]

    def set(self, update: int) -> None:
        """Sets the learning rates of one update: a function of its number alone."""
        scale = min(1.0, (update + 1) / self._updates) if self._updates else 1.0
        for group, learning_rate in zip(self._optimizer.param_groups, self._learning_rates, strict=True):
            group["lr"] = learning_rate * scale


class LocalUpdater:
    """Applies updates in this process alone (a `core.protocols.Updater`).

    Args:
        optimizer: with the learning rates to warm up to.
        grad_clip: largest global norm of the gradient.
        warmup_updates: see `WarmUp`.
    """

    def __init__(self, *, optimizer: Optimizer, grad_clip: float, warmup_updates: int) -> None:
        if not grad_clip > 0:
            raise ValueError(f"grad_clip must be positive, got {grad_clip}")
        self._optimizer = optimizer
        self._grad_clip = grad_clip
        self._warm_up = WarmUp(optimizer, warmup_updates)
        self.skipped = 0
        """Updates that were refused because their gradient was not finite."""

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot()

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def together(self, compute: Callable[[], T]) -> T:
        return compute()

    def apply(self, update: int, closure: Callable[[], T]) -> tuple[float, T]:
        """See `core.protocols.Updater`. A gradient that is not finite changes nothing and is counted."""
        self._optimizer.zero_grad(set_to_none=True)
        result = closure()
        parameters = optimizer_parameters(self._optimizer)
        total = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        norm = float(total)
        if math.isfinite(norm):
            clip_grads_with_norm_(parameters, self._grad_clip, total)
            self._warm_up.set(update)
            self._optimizer.step()
        else:
            self.skipped += 1
            log.warning("update %d skipped: its gradient norm is %s", update, norm)
        self._optimizer.zero_grad(set_to_none=True)
        return norm, result

    def total(self, sums: Tensor) -> Tensor:
        return sums

    def state(self, names: Mapping[str, nn.Parameter]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """See `flatten_optimizer`."""
        return flatten_optimizer(self._optimizer, names)

    def restore(
        self, names: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]
    ) -> None:
        """See `restore_optimizer`."""
        restore_optimizer(self._optimizer, names, tensors, scalars)


def flatten_optimizer(
    optimizer: Optimizer, names: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Copies an optimizer's state: tensors (for safetensors) and scalars (for JSON), keyed `field/parameter`.

    Learning rates and other settings of the groups are configuration, not state, and stay out.

    Args:
        names: the model's parameters by name, such as `dict(model.named_parameters())`.

    Raises:
        ValueError: the optimizer holds a parameter that has no name.
    """
    name_of = {parameter: name for name, parameter in names.items()}
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for parameter in optimizer_parameters(optimizer):
        if parameter not in name_of:
            raise ValueError(f"names lacks a parameter of the optimizer, of shape {tuple(parameter.shape)}")
        for field, value in optimizer.state.get(parameter, {}).items():
            key = f"{field}/{name_of[parameter]}"
            if isinstance(value, Tensor):
                tensors[key] = value.detach().to("cpu", copy=True).contiguous()
            else:
                scalars[key] = value
    return tensors, scalars


def restore_optimizer(
    optimizer: Optimizer,
    names: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
    scalars: Mapping[str, Any],
) -> None:
    """Gives an optimizer the state that `flatten_optimizer` took, bit for bit, in place of its own.

    Raises:
        ValueError: the state names a parameter that this optimizer does not hold; nothing is restored then.
    """
    index_of = {parameter: index for index, parameter in enumerate(optimizer_parameters(optimizer))}
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**tensors, **scalars}.items():
        field, _, name = key.partition("/")
        parameter = names.get(name)
        if parameter is None or parameter not in index_of:
            raise ValueError(f"optimizer state {key} belongs to no parameter of this optimizer")
        state.setdefault(index_of[parameter], {})[field] = value
    # torch's own loading copies, and knows which fields follow their parameter's device and dtype.
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def optimizer_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
