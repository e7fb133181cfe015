"""A process that does what a spot worker computes, on a core of its own, and tells nobody.

Cores share memory bandwidth and caches, and some are two threads of one, which GPUs of their own do not. What a job
takes beside a busy neighbour is what it takes beside a spot worker, but for what the system itself costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.synchronize import Event

from src.app.config import Config, task
from src.app.sampling import build_worker_engine
from src.core.types import PolicyVersion, RequestKey, RequestKind, SampleRequest, SampleSpec
from src.spot.worker import give_way

_START_S = 120.0


@contextmanager
def neighbour(config: Config, cores: Sequence[int]) -> Iterator[None]:
    """Samples on these cores meanwhile.

    Raises:
        RuntimeError: it does not start.
    """
    context = get_context("spawn")
    busy = context.Event()
    process = context.Process(target=sample_for_ever, args=(config, cores, busy), daemon=True)
    process.start()
    try:
        if not busy.wait(_START_S):
            raise RuntimeError(f"the neighbour made nothing in {_START_S:.0f} s")
        yield
    finally:
        process.kill()
        process.join()


def sample_for_ever(config: Config, cores: Sequence[int], busy: Event) -> None:
    """Explores seeds of one prompt, one pass after the other."""
    give_way(niceness=config["cluster"]["nice"], cpus=cores)
    engine = build_worker_engine(config)
    spec, policy = SampleSpec(config["algo"]["steps"], (0, 1, 2, 3)), PolicyVersion(0, 0)
    prompt = task(config).train_prompts[0]
    keys = [RequestKey("run", 0, RequestKind.EXPLORE, 0, seed, policy, spec.steps) for seed in range(engine.batch_size)]
    while True:
        engine.serve([SampleRequest(key, prompt, spec) for key in keys], "neighbour")
        busy.set()
