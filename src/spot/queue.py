"""Requests that wait for a worker, in the order in which they are to be served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice

from src.core.types import PolicyVersion, RequestKey, RequestKind, SampleRequest, SampleSpec

_Tag = tuple[PolicyVersion, SampleSpec, int, str]
_Bucket = OrderedDict[RequestKey, SampleRequest]


class RequestQueue:
    """Smallest kind first; within a kind first come, first served, in lines of one policy, spec, step and spoiler.

    `step` is where a request goes on, `spoilt_by` the worker that failed to make it, if one did. A request that joins
    others of its line goes with them. All operations take constant time per request; `take` looks at each line.
    """

    def __init__(self) -> None:
        self._kinds: dict[RequestKind, OrderedDict[_Tag, _Bucket]] = {k: OrderedDict() for k in RequestKind}

    def __bool__(self) -> bool:
        return any(self._kinds.values())

    def append(self, request: SampleRequest, step: int = 0, spoilt_by: str = "") -> None:
        """Queues a request behind the others."""
        buckets, tag = self._line(request, step, spoilt_by)
        bucket = buckets.get(tag)
        if bucket is None:
            bucket = buckets[tag] = OrderedDict()
        bucket[request.key] = request

    def prepend(self, request: SampleRequest, step: int = 0, spoilt_by: str = "") -> None:
        """Queues a request before all others of its kind."""
        self.append(request, step, spoilt_by)
        buckets, tag = self._line(request, step, spoilt_by)
        buckets[tag].move_to_end(request.key, last=False)
        buckets.move_to_end(tag, last=False)

    def discard(self, request: SampleRequest, step: int = 0, spoilt_by: str = "") -> None:
        """Takes a request out, if it is there."""
        buckets, tag = self._line(request, step, spoilt_by)
        if tag in buckets:
            buckets[tag].pop(request.key, None)
            if not buckets[tag]:
                del buckets[tag]

    def take(
        self,
        kinds: Iterable[RequestKind],
        count: Callable[[RequestKind, int, int], int],
        *,
        worker: str = "",
        choosy: bool = False,
    ) -> tuple[SampleRequest, ...]:
        """Takes out the next batch; `kinds` are tried in the order given.

        `count(kind, queued, steps)` says how many at most: `queued` requests of the kind wait in the batch's line,
        and each has `steps` denoising steps before it. Of lines of a kind, those that `worker` spoilt come last, and
        never if it is `choosy`.
        """
        kind = next((kind for kind in kinds if self._kinds[kind]), None)
        if kind is None:
            return ()
        buckets = self._kinds[kind]
        tag = next((tag for tag in buckets if tag[-1] != worker), None)
        if tag is None:
            if choosy:
                return ()
            tag = next(iter(buckets))
        bucket = buckets[tag]
        _, spec, step, _ = tag
        most = count(kind, len(bucket), spec.steps - step)
        if most >= len(bucket):
            del buckets[tag]
            return tuple(bucket.values())
        batch = tuple(islice(bucket.values(), most))
        for request in batch:
            del bucket[request.key]
        return batch

    def policies(self) -> set[PolicyVersion]:
        """The policies that queued requests need."""
        return {policy for buckets in self._kinds.values() for policy, *_ in buckets}

    def _line(self, request: SampleRequest, step: int, spoilt_by: str) -> tuple[OrderedDict[_Tag, _Bucket], _Tag]:
        return self._kinds[request.key.kind], (request.key.policy, request.spec, step, spoilt_by)
