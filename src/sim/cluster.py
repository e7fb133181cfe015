"""A cluster on a virtual clock, as the trainer sees it (`core.protocols.Cluster`).

The training module, the coordinator with scheduler, planner and ledger, and the market are those of a real run, and
what the trainer computes is computed. Only durations come from a hardware profile: whatever the trainer or a worker
does takes as long as the profile says, however fast this machine is. Held-out evaluation is the yardstick and no part
of the job: it takes no virtual time and no worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from src.core.clock import Clock
from src.core.types import Exploration, PolicyVersion, RequestKey, RequestKind, SampleRequest, SampleResult
from src.sim.fleet import Node, VirtualFleet
from src.sim.shape import Durations, Samples
from src.sim.timeline import Timeline
from src.spot import weights
from src.spot.coordinator import Coordinator

T = TypeVar("T")


class VirtualCluster:
    """See the top of this module. `coordinator` must read the time from `timeline`."""

    def __init__(
        self,
        *,
        timeline: Timeline,
        coordinator: Coordinator,
        fleet: VirtualFleet,
        durations: Durations,
        samples: Samples,
    ) -> None:
        introduction = coordinator.introduce()
        self.run = introduction.run
        self.incarnation = introduction.incarnation
        self.now: Clock = coordinator.now
        self._weights_root = introduction.weights_root
        self._timeline = timeline
        self._coordinator = coordinator
        self._fleet = fleet
        self._durations = durations
        self._samples = samples
        self._trainers: list[Node] = []
        """Spot nodes that train."""

    def publish(self, version: PolicyVersion, save: Callable[[Path], str]) -> None:
        published = weights.publish(self._weights_root, version, save)
        self._timeline.advance(self._durations.publish_s)
        old = self._coordinator.publish(version, published.checksum, published.bytes, self._durations.publish_s)
        weights.remove(self._weights_root, old)

    def submit(self, requests: Sequence[SampleRequest], *, behind_rollouts: bool = False) -> None:
        self._coordinator.submit(requests, behind_rollouts=behind_rollouts)
        self._fleet.start_granted()

    def collect(self, requests: Sequence[SampleRequest]) -> list[SampleResult]:
        if requests and requests[0].key.kind is RequestKind.EVAL:
            return self._samples.make(requests)
        self.submit(requests)
        keys = [request.key for request in requests]
        self._wait(keys)
        return self._coordinator.close(keys)

    def close(self, requests: Sequence[SampleRequest], *, wait_s: float) -> list[SampleResult]:
        keys = [request.key for request in requests]
        self._wait(keys, at_most_s=wait_s)
        return self._coordinator.close(keys)

    def open_exploration(self, exploration: Exploration, *, behind_rollouts: bool = False) -> None:
        self._coordinator.open_exploration(exploration, behind_rollouts=behind_rollouts)
        self._fleet.start_granted()

    def close_exploration(self, *, wait_s: float) -> list[SampleResult]:
        self._wait(self._coordinator.explores, at_most_s=wait_s)
        return self._coordinator.close_exploration()

    def _wait(self, keys: Sequence[RequestKey], *, at_most_s: float = math.inf) -> None:
        """Lets time pass until all keys have their results; the reserved GPUs serve meanwhile."""
        with self._fleet.serving():
            self._timeline.run(self._completion(keys), at_most_s=at_most_s)

    def _completion(self, keys: Sequence[RequestKey]) -> Callable[[], bool]:
        """Tells whether all keys have their results, those included that are still added; looks at each once."""
        done = 0

        def is_complete() -> bool:
            nonlocal done
            while done < len(keys) and self._coordinator.has(keys[done]):
                done += 1
            return done == len(keys)

        return is_complete

    def planner_state(self) -> Mapping[str, Any]:
        return self._coordinator.planner_state()

    def restore_planner(self, state: Mapping[str, Any]) -> None:
        self._coordinator.restore_planner(state)

    def workers(self) -> int:
        return self._coordinator.workers()

    @contextmanager
    def phase(self, name: str, iteration: int) -> Iterator[None]:
        self.record("phase_started", name=name, iteration=iteration)
        start_s = self.now()
        try:
            yield
            if name == "train":
                self._train(iteration)
        finally:
            self.record("phase", name=name, iteration=iteration, start_s=start_s, end_s=self.now())

    def _train(self, iteration: int) -> None:
        """The updates of an iteration. Spot nodes join the reserved ones before the first; if one goes, the others form
        a new group and begin the update in hand again."""
        if (nodes := self._fleet.training_nodes()) != self._trainers:
            self._trainers = nodes
            self._timeline.advance(self._durations.regroup_s)
        for _ in range(self._durations.updates):
            while not self._update(iteration):
                self._trainers = [node for node in self._trainers if not node.gone]
                self._timeline.advance(self._durations.regroup_s)

    def _update(self, iteration: int) -> bool:
        """Whether it came to its end."""
        start_s, spot_gpus = self.now(), sum(len(node.gpus) for node in self._trainers)
        lost = self._timeline.run(
            lambda: any(node.gone for node in self._trainers),
            at_most_s=self._durations.update_s(self._fleet.reserved_gpus + spot_gpus),
        )
        if spot_gpus:
            nodes = [node.name for node in self._trainers]
            span = {"start_s": start_s, "end_s": self.now(), "lost": lost}
            self.record("spot_trained", iteration=iteration, nodes=nodes, gpus=spot_gpus, **span)
        return not lost

    def lead(self, act: Callable[[], T]) -> T:
        return act()

    def record(self, kind: str, **fields: Any) -> None:
        self._coordinator.record(kind, **fields)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._coordinator.log.log_metrics(step, metrics)

    def should_stop(self) -> bool:
        return self._coordinator.stop_requested
