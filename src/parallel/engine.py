"""Gradient steps of several training ranks through DeepSpeed's engine (ZeRO 0, 1 or 2) on a dp x sp mesh.

The gradient is summed over the ranks that share a sequence and averaged over the dp ranks; losses are multiplied by dp
here, so that the sum over all ranks' micro-batches is what one rank would have computed. With
`managed_gradient_accumulation: false` the engine reduces at `step()`, after any number of micro-batches. (Its own
counting gave 0.72 to 1.28 times the true gradient when a step has several micro-batches.)
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from src.core.types import Snapshot
from src.models.adapter import state_checksum
from src.parallel.mesh import World
from src.parallel.updater import WarmUp, flatten_optimizer, optimizer_parameters, restore_optimizer

T = TypeVar("T")

log = logging.getLogger(__name__)


def prepare_deepspeed(device: torch.device) -> Any:
    """Imports DeepSpeed for this kind of device and returns the package. To be called before any group is made."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read once, at the import
    import deepspeed
    import deepspeed.ops

    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    # On CPUs its first collective would compile a C++ extension: minutes, and a lock that outlives a killed process.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def renew_engine(deepspeed: Any, engine: Any, make: Callable[[], Any]) -> Any:
    """An engine for other groups than those that `engine` was told of. `make` makes it around the same model and
    optimizer, whose state stays as it is."""
    deepspeed.utils.groups._release_process_group_references()
    deepspeed.comm.comm.cdb = None
    deepspeed.init_distributed(dist_init_required=False, verbose=False)
    for hook in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
        hook.remove()
    return make()


def expect_equal_weights(deepspeed: Any) -> None:
    """Has engines take it that all ranks hold the same weights, where they would make sure by a broadcast: for ranks
    that do not make their engines at the same time."""
    deepspeed.DeepSpeedEngine._broadcast_model = lambda engine: None


def engine_config(*, stage: int, grad_clip: float) -> dict[str, Any]:
    """DeepSpeed's configuration.

    Raises:
        ValueError: ZeRO stage 3.
    """
    if stage not in (0, 1, 2):
        raise ValueError(
            f"ZeRO stage must be 0, 1 or 2 (3 is not known to be right with sequence parallelism), got {stage}"
        )
    return {
        "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "gradient_clipping": grad_clip if stage else 0.0,  # without ZeRO we clip: see EngineUpdater
    }


class EngineUpdater:
    """Applies updates through an engine that was made with `engine_config` (a `core.protocols.Updater`).

    With ZeRO the engine clips by the norm over all partitions, and refuses gradients that are not finite. Without, its
    optimizer is the plain one, and steps whatever the gradient is: a hook before its step does both.

    Args:
        engine: with the learning rates to warm up to.
        world: of whose mesh the engine was told.
        stage: ZeRO stage of the engine.
        grad_clip, warmup_updates: see `LocalUpdater`.
    """

    def __init__(self, *, engine: Any, world: World, stage: int, grad_clip: float, warmup_updates: int) -> None:
        self._engine = engine
        self._world = world
        self._grad_clip = grad_clip
        self._warm_up = WarmUp(engine.optimizer, warmup_updates)
        self._zero = stage > 0
        self._norm = 0.0
        self.skipped = 0
        if not self._zero:
            engine.optimizer.register_step_pre_hook(lambda optimizer, *_: self._clip(optimizer))

    @property
    def snapshot(self) -> Snapshot:
        return self._world.mesh.snapshot

    def exchange(self, engine: Any) -> None:
        """Goes on with an engine that was made anew around the same optimizer."""
        self._engine = engine

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss * self.snapshot.dp)

    def total(self, sums: Tensor) -> Tensor:
        """See `core.protocols.Updater`. Ranks that share sequences have equal sums: each counts once."""
        on_device = sums.to(self._engine.device, copy=True)
        dist.all_reduce(on_device, group=self._world.mesh.data)
        return on_device.to(sums.device)

    def together(self, compute: Callable[[], T]) -> T:
        return self._world.run(compute)

    def apply(self, update: int, closure: Callable[[], T]) -> tuple[float, T]:
        """See `core.protocols.Updater`. A gradient that is not finite changes nothing and is counted."""
        return self._world.run(lambda: self._apply(update, closure), changes=self)

    def _apply(self, update: int, closure: Callable[[], T]) -> tuple[float, T]:
        self._engine.optimizer.zero_grad()
        result = closure()
        self._warm_up.set(update)
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm()) if self._zero else self._norm
        if not math.isfinite(norm):
            self.skipped += 1
            log.warning("update %d skipped: its gradient norm is %s", update, norm)
        return norm, result

    def _clip(self, optimizer: Optimizer) -> None:
        parameters = optimizer_parameters(optimizer)
        total = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        self._norm = float(total)
        if math.isfinite(self._norm):
            clip_grads_with_norm_(parameters, self._grad_clip, total)
        else:
            for parameter in parameters:
                parameter.grad = None  # what has no gradient is left as it is

    # ---------------------------------------------------------------- without ZeRO: every rank holds all (mesh.Shared)

    def give(self) -> Any:
        names = self._numbered()
        weights = {name: parameter.detach().to("cpu", copy=True) for name, parameter in names.items()}
        return weights, flatten_optimizer(self._engine.optimizer, names), self.skipped

    def take(self, given: Any) -> None:
        weights, (tensors, scalars), self.skipped = given
        names = self._numbered()
        with torch.no_grad():
            for name, parameter in names.items():
                parameter.copy_(weights[name])
        restore_optimizer(self._engine.optimizer, names, tensors, scalars)

    def checksum(self) -> str:
        weights, (tensors, scalars), _ = self.give()
        counters = {name: torch.tensor(value) for name, value in scalars.items()}
        return state_checksum({**{f"weight/{name}": value for name, value in weights.items()}, **tensors, **counters})

    def _numbered(self) -> dict[str, nn.Parameter]:
        return {str(number): each for number, each in enumerate(optimizer_parameters(self._engine.optimizer))}

    # ---------------------------------------------------------------- state, whole and on every rank

    def state(self, names: Mapping[str, nn.Parameter]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `flatten_optimizer` gives in one process. All ranks must call it."""
        if not self._zero:
            return flatten_optimizer(self._engine.optimizer, names)
        name_of = {parameter: name for name, parameter in names.items()}
        tensors: dict[str, Tensor] = {}
        scalars: dict[str, Any] = {}
        for partition, parameters, group in self._partitions():
            # Sorted: all ranks must gather the same field at a time, whatever order it was filled in.
            for field, value in sorted(self._engine.optimizer.optimizer.state.get(partition, {}).items()):
                whole = self._whole(value, partition, parameters, group)
                for parameter, part in zip(parameters, whole, strict=True):
                    kept = part.detach().to("cpu", copy=True).contiguous() if isinstance(part, Tensor) else part
                    (tensors if isinstance(kept, Tensor) else scalars)[f"{field}/{name_of[parameter]}"] = kept
        return tensors, scalars

    def restore(
        self, names: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]
    ) -> None:
        """Takes such a state, of any number of ranks, and the weights that the model holds now."""
        if not self._zero:
            restore_optimizer(self._engine.optimizer, names, tensors, scalars)
            return
        zero = self._engine.optimizer
        zero.refresh_fp32_params()
        whole = {**tensors, **scalars}
        name_of = {parameter: name for name, parameter in names.items()}
        known = {name_of[parameter] for _, parameters, _ in self._partitions() for parameter in parameters}
        for key in whole:
            if key.partition("/")[2] not in known:
                raise ValueError(f"optimizer state {key} belongs to no parameter of this optimizer")
        zero.optimizer.state.clear()
        for partition, parameters, group in self._partitions():
            for field in sorted({key.partition("/")[0] for key in whole}):
                # What never had a gradient has no state in one process: zeros are the same.
                values = [whole.get(f"{field}/{name_of[parameter]}") for parameter in parameters]
                zero.optimizer.state[partition][field] = self._part(values, partition, parameters, group)

    def _partitions(self) -> Iterator[tuple[Tensor, list[nn.Parameter], Any]]:
        """Of each group of parameters: this rank's flat part, the parameters in order, who has the other parts."""
        zero = self._engine.optimizer
        yield from zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, zero.real_dp_process_group, strict=True)

    @staticmethod
    def _whole(value: Any, partition: Tensor, parameters: list[nn.Parameter], group: Any) -> list[Any]:
        """A field of the state for each parameter, from the partitions of all ranks."""
        if not isinstance(value, Tensor) or value.shape != partition.shape:
            return [value] * len(parameters)  # a counter of steps: equal everywhere
        flat = value.new_empty(value.numel() * dist.get_world_size(group))
        dist.all_gather_into_tensor(flat, value.contiguous(), group=group)
        sizes = [parameter.numel() for parameter in parameters]
        parts = torch.split(flat[: sum(sizes)], sizes)  # behind them comes padding
        return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]

    @staticmethod
    def _part(values: list[Any], partition: Tensor, parameters: list[nn.Parameter], group: Any) -> Any:
        """The inverse of `_whole`: this rank's partition of a field."""
        known = next(value for value in values if value is not None)
        if not isinstance(known, Tensor) or known.dim() == 0:
            return known.clone() if isinstance(known, Tensor) else known  # a counter of steps
        whole = [torch.zeros_like(p) if v is None else v for v, p in zip(values, parameters, strict=True)]
        flat = torch.cat([value.reshape(-1).to(partition) for value in whole])
        padded = flat.new_zeros(partition.numel() * dist.get_world_size(group))
        padded[: flat.numel()] = flat
        return padded.view(-1, partition.numel())[dist.get_rank(group)].clone()
