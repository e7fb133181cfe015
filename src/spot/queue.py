"""Requests that wait for a worker, in the order in which they are to be served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice

from src.core.types import PolicyVersion, RequestKey, RequestKind, SampleRequest, SampleSpec

_Tag = tuple[PolicyVersion, SampleSpec, int]
_Bucket = OrderedDict[RequestKey, SampleRequest]


class RequestQueue:
    """Smallest kind first; within a kind first come, first served, in batches of one policy, spec and step.

    `step` is where a request goes on. A request that joins others of its policy, spec and step goes with them. All
    operations take constant time per request.
    """

    def __init__(self) -> None:
        self._kinds: dict[RequestKind, OrderedDict[_Tag, _Bucket]] = {k: OrderedDict() for k in RequestKind}

    def __bool__(self) -> bool:
        return any(self._kinds.values())

    def append(self, request: SampleRequest, step: int = 0) -> None:
        """Queues a request behind the others."""
        buckets = self._kinds[request.key.kind]
        tag = (request.key.policy, request.spec, step)
        bucket = buckets.get(tag)
        if bucket is None:
            bucket = buckets[tag] = OrderedDict()
        bucket[request.key] = request

    def prepend(self, request: SampleRequest, step: int = 0) -> None:
        """Queues a request before all others of its kind."""
        self.append(request, step)
        buckets, tag = self._kinds[request.key.kind], (request.key.policy, request.spec, step)
        buckets[tag].move_to_end(request.key, last=False)
        buckets.move_to_end(tag, last=False)

    def discard(self, request: SampleRequest, step: int = 0) -> None:
        """Takes a request out, if it is there."""
        buckets, tag = self._kinds[request.key.kind], (request.key.policy, request.spec, step)
        if tag in buckets:
            buckets[tag].pop(request.key, None)
            if not buckets[tag]:
                del buckets[tag]

    def take(
        self, kinds: Iterable[RequestKind], count: Callable[[RequestKind, int, int], int]
    ) -> tuple[SampleRequest, ...]:
        """Takes out the next batch; `kinds` are tried in the order given.

        `count(kind, queued, steps)` says how many at most: `queued` requests of the kind wait in the batch's line,
        and each has `steps` denoising steps before it.
        """
        kind = next((kind for kind in kinds if self._kinds[kind]), None)
        if kind is None:
            return ()
        tag, bucket = next(iter(self._kinds[kind].items()))
        _, spec, step = tag
        most = count(kind, len(bucket), spec.steps - step)
        if most >= len(bucket):
            del self._kinds[kind][tag]
            return tuple(bucket.values())
        batch = tuple(islice(bucket.values(), most))
        for request in batch:
            del bucket[request.key]
        return batch

    def policies(self) -> set[PolicyVersion]:
        """The policies that queued requests need."""
        return {policy for buckets in self._kinds.values() for policy, _, _ in buckets}
