"""Requests that wait for a worker, in the order in which they are to be served."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from src.core.types import PolicyVersion, RequestKey, RequestKind, SampleRequest, SampleSpec

_Tag = tuple[PolicyVersion, SampleSpec]
_Bucket = OrderedDict[RequestKey, SampleRequest]


class RequestQueue:
    """Smallest kind first; within a kind first come, first served, in batches of one policy and one spec.

    A request that joins others of its policy and spec goes with them. All operations take constant time per
    request.
    """

    def __init__(self) -> None:
        self._kinds: dict[RequestKind, OrderedDict[_Tag, _Bucket]] = {k: OrderedDict() for k in RequestKind}

    def __bool__(self) -> bool:
        return any(self._kinds.values())

    def append(self, request: SampleRequest) -> None:
        """Queues a request behind the others."""
        buckets = self._kinds[request.key.kind]
        buckets.setdefault(_tag(request), OrderedDict())[request.key] = request

    def prepend(self, request: SampleRequest) -> None:
        """Queues a request before all others of its kind."""
        self.append(request)
        buckets, tag = self._kinds[request.key.kind], _tag(request)
        buckets[tag].move_to_end(request.key, last=False)
        buckets.move_to_end(tag, last=False)

    def discard(self, request: SampleRequest) -> None:
        """Takes a request out, if it is there."""
        buckets, tag = self._kinds[request.key.kind], _tag(request)
        if tag in buckets:
            buckets[tag].pop(request.key, None)
            if not buckets[tag]:
                del buckets[tag]

    def take(self, kinds: Iterable[RequestKind], count: int) -> tuple[SampleRequest, ...]:
        """Takes out the next batch, at most `count` requests; `kinds` are tried in the order given."""
        buckets = next((self._kinds[kind] for kind in kinds if self._kinds[kind]), None)
        if buckets is None:
            return ()
        batch = tuple(islice(next(iter(buckets.values())).values(), count))
        for request in batch:
            self.discard(request)
        return batch

    def policies(self) -> set[PolicyVersion]:
        """The policies that queued requests need."""
        return {policy for buckets in self._kinds.values() for policy, _ in buckets}


def _tag(request: SampleRequest) -> _Tag:
    return request.key.policy, request.spec
