"""How training ranks are run, as Lightning strategies. Only this layer knows world size and rank."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.precision import DeepSpeedPrecision
from pytorch_lightning.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from torch import nn
from torch.optim import Optimizer

from src.parallel.engine import EngineUpdater, engine_config, expect_equal_weights, prepare_deepspeed, renew_engine
from src.parallel.mesh import Mesh, World
from src.parallel.updater import LocalUpdater


class LocalStrategy(SingleDeviceStrategy):
    """One training rank.

    Args:
        device: of the model: cpu, or cuda for the process's current GPU.
        warmup_updates: optimizer updates over which the learning rate rises linearly.
        grad_clip: largest global norm of the gradient.
    """

    updater: LocalUpdater

    def __init__(self, *, device: str, warmup_updates: int, grad_clip: float) -> None:
        super().__init__(device=torch.device(device, 0) if device == "cuda" else device)  # Lightning wants a number
        self._warmup_updates = warmup_updates
        self._grad_clip = grad_clip

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        (optimizer,) = self.optimizers
        self.updater = LocalUpdater(
            optimizer=optimizer,
            grad_clip=self._grad_clip,
            warmup_updates=self._warmup_updates,
        )


class _AsTheyAre(DeepSpeedPrecision):
    """Leaves the model as it is: a frozen one is in bf16 below an adapter in fp32, and the parent would make all of it
    fp32. Leaves batches as they are: ours hold prompts, no tensors, and are frozen, which the parent refuses."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    def convert_input(self, data: Any) -> Any:
        return data


class UlyssesStrategy(DeepSpeedStrategy):
    """Several training ranks in groups that share sequences, through DeepSpeed (ZeRO 0, 1 or 2).

    Processes and groups are there before Lightning: our launcher starts the ranks (Lightning's would start a whole
    sweep again in each, and kills all when one ends), and samples are made with the groups before the first update.
    On CPUs, which Lightning's strategy refuses, gloo takes the place of NCCL.

    Where ranks come and go, Lightning takes each for the only one: what it would have them do together is for nothing
    here, and no operation of the world. The engine is made anew with every mesh, around the same optimizer.

    Args:
        world: the ranks and their groups.
        stage: of ZeRO.
        warmup_updates, grad_clip: see `LocalStrategy`.

    Raises:
        ValueError: ZeRO stage 3.
    """

    updater: EngineUpdater

    def __init__(self, *, world: World, stage: int, warmup_updates: int, grad_clip: float) -> None:
        config = engine_config(stage=stage, grad_clip=grad_clip)
        self._deepspeed = prepare_deepspeed(world.mesh.device)
        super().__init__(config=config)
        if world.is_elastic:
            expect_equal_weights(self._deepspeed)
        self._world = world
        self._stage = stage
        self._warmup_updates = warmup_updates
        self._grad_clip = grad_clip

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks that share sequences read the same data."""
        return {"num_replicas": self._world.mesh.snapshot.dp, "rank": self._world.mesh.snapshot.dp_rank}

    @property
    def world_size(self) -> int:
        return 1 if self._world.is_elastic else super().world_size

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self._world.is_elastic:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._world.is_elastic else super().broadcast(obj, src)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return tensor if self._world.is_elastic else super().reduce(tensor, *args, **kwargs)

    def setup_environment(self) -> None:
        if self._world.mesh.device.type == "cpu":
            DDPStrategy.setup_environment(self)  # past a check that asks for CUDA
        else:
            super().setup_environment()

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._deepspeed.init_distributed(dist_init_required=False, verbose=False)

    def setup(self, trainer: pl.Trainer) -> None:
        self.precision_plugin = _AsTheyAre(self.precision_plugin.precision)  # type: ignore[arg-type]
        super().setup(trainer)
        self.updater = EngineUpdater(
            engine=self.model,
            world=self._world,
            stage=self._stage,
            grad_clip=self._grad_clip,
            warmup_updates=self._warmup_updates,
        )
        self._world.share(self.updater)
        self._world.on_change(self._follow)

    def save_engine(self, folder: Path, name: str) -> None:
        """Writes what DeepSpeed's `engine.load_checkpoint(folder)` reads on as many ranks. All ranks must call it."""
        engine: Any = self.model
        self._world.run(lambda: engine.save_checkpoint(str(folder), tag=name, exclude_frozen_parameters=True))

    def _follow(self, mesh: Mesh) -> None:
        """An engine for another mesh."""
        old: Any = self.model
        engine = renew_engine(
            self._deepspeed, old, lambda: self._setup_model_and_optimizer(old.module, self.optimizers[0])[0]
        )
        self.model = engine
        self.updater.exchange(engine)

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Optimizer]:
        """As the parent's, but the engine is told of the mesh, and of a device number on CPUs too."""
        engine, engine_optimizer, _, _ = self._deepspeed.initialize(
            args=Namespace(device_rank=self.local_rank),
            config=self.config,
            model=model,
            model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            mpu=self._world.mesh,
            dist_init_required=False,
        )
        return engine, engine_optimizer
