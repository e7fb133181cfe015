"""Ulysses sequence parallelism (arXiv 2309.14509): the ranks of a group hold parts of every sequence, and swap
them for parts of the heads around attention.

    tokens of rank r, all heads   --exchange-->   all tokens, heads of rank r   --attention, exchange back-->

Neither tokens nor heads need to divide by the size of the group: whoever comes first holds one more, and a rank may
hold none. Nothing is padded, so nothing of it can leak into a loss.

Gradients: a rank's parameter gradients cover its own tokens, so those of the whole sequence are their **sum** over
the group. `SequenceGroup.gather` fits that: every rank computes the same loss of the whole output, and takes back the
gradient of its own part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Work(Protocol):
    """A collective on its way."""

    def wait(self) -> Any: ...


class Group(Protocol):
    """What is used of a process group: one of `torch.distributed`'s, or one of its bare backends."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def alltoall_base(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], /
    ) -> Work: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], /) -> Work: ...


def parts(count: int, size: int) -> list[int]:
    """How many of `count` things each of `size` ranks holds: as even as possible, the larger parts first.

    >>> parts(7, 3)
    [3, 2, 2]
    """
    return [count // size + (rank < count % size) for rank in range(size)]


class SequenceGroup:
    """The ranks that share the sequences of a model at this moment.

    The hooks and the attention of a model hold this object and look at it in every forward pass, so between two passes
    the group may be exchanged (`enter`), or left (`enter(None)`): then the model computes alone, as it did before.
    """

    def __init__(self, group: Group | None = None) -> None:
        self.enter(group)

    def enter(self, group: Group | None) -> None:
        """Takes another group from the next forward pass on; None for no other ranks."""
        self.group = group if group is not None and group.size() > 1 else None
        self.rank = self.group.rank() if self.group else 0
        self.size = self.group.size() if self.group else 1

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceGroup:
        return self  # a copy of a model, such as the frozen reference, stays in the model's group

    def shard(self, values: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor that all ranks have."""
        return torch.split(values, parts(values.shape[dim], self.size), dim)[self.rank] if self.group else values

    def gather(self, part_BLC: Tensor, length: int) -> Tensor:
        """The whole sequence of `length` tokens, on every rank. The inverse of `shard(..., dim=1)`."""
        if self.group is None:
            return part_BLC
        whole_BLC: Tensor = _Gather.apply(part_BLC, parts(length, self.size), self.group)  # type: ignore[no-untyped-call]
        return whole_BLC

    def attention(
        self,
        q_BLHD: Tensor,
        k_BLHD: Tensor,
        v_BLHD: Tensor,
        *,
        lengths: Sequence[int],
        mask_BL: Tensor | None = None,
    ) -> Tensor:
        """Attention between all tokens of all ranks; takes and returns this rank's tokens.

        Args:
            q_BLHD, k_BLHD, v_BLHD: all heads of this rank's tokens. If a sequence consists of several streams (text
                and image), each stream is sharded by itself and the parts are joined: text part, image part.
            lengths: whole lengths of these streams, in order.
            mask_BL: true where a key is real, for the whole streams in order; equal on all ranks. None: all are.
        """
        if self.group is None:
            return _attend(q_BLHD, k_BLHD, v_BLHD, mask_BL)
        by_stream = [parts(length, self.size) for length in lengths]
        tokens = [sum(of_rank) for of_rank in zip(*by_stream, strict=True)]
        if tokens[self.rank] != q_BLHD.shape[1]:  # unequal sizes would abort the process inside the collective
            raise ValueError(
                f"lengths {tuple(lengths)} give rank {self.rank} of {self.size} {tokens[self.rank]} tokens, "
                f"got {q_BLHD.shape[1]}"
            )
        heads = parts(q_BLHD.shape[2], self.size)
        q, k, v = _to_heads((q_BLHD, k_BLHD, v_BLHD), tokens, heads, self.group)
        if mask_BL is not None:
            mask_BL = _in_order_of_ranks(mask_BL, lengths, by_stream)
        return _to_tokens(_attend(q, k, v, mask_BL), tokens, heads, self.group)


def _attend(q_BLHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, mask_BL: Tensor | None) -> Tensor:
    mask_B11L = None if mask_BL is None else mask_BL[:, None, None, :]
    q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BLHD, v_BLHD))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask_B11L).transpose(1, 2)


def _in_order_of_ranks(mask_BL: Tensor, lengths: Sequence[int], by_stream: Sequence[list[int]]) -> Tensor:
    """The exchanged tokens come rank by rank: text part 0, image part 0, text part 1, ... So must their mask."""
    whole = torch.split(mask_BL, list(lengths), 1)
    streams = [torch.split(stream, sizes, 1) for stream, sizes in zip(whole, by_stream, strict=True)]
    return torch.cat([part for of_rank in zip(*streams, strict=True) for part in of_rank], dim=1)


_TOKENS, _HEADS = 1, 2
"""Dimensions of [B, L, H, D]."""


def _to_heads(values: Sequence[Tensor], tokens: list[int], heads: list[int], group: Group) -> list[Tensor]:
    """Gives away heads and gets tokens; all values travel in one collective."""
    return list(_Exchange.apply(group, (_HEADS, heads), (_TOKENS, tokens), *values))  # type: ignore[no-untyped-call]


def _to_tokens(value: Tensor, tokens: list[int], heads: list[int], group: Group) -> Tensor:
    """Gives away tokens and gets heads."""
    (own,) = _Exchange.apply(group, (_TOKENS, tokens), (_HEADS, heads), value)  # type: ignore[no-untyped-call]
    assert isinstance(own, Tensor)
    return own


_Side = tuple[int, list[int]]
"""A dimension, and how much of it each rank holds when it is shared out."""


class _Exchange(torch.autograd.Function):
    """Shares out one dimension among the ranks and joins another. The gradient goes the way back."""

    @staticmethod
    def forward(ctx: Any, group: Group, shared: _Side, joined: _Side, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.way = (group, shared, joined)
        return _exchange(values, *ctx.way)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        group, shared, joined = ctx.way
        return None, None, None, *_exchange(gradients, group, joined, shared)


def _exchange(values: Sequence[Tensor], group: Group, shared: _Side, joined: _Side) -> tuple[Tensor, ...]:
    (share_dim, shares), (join_dim, joins) = shared, joined
    first, count = values[0], len(values)

    def shape(share: int, join: int) -> list[int]:
        """Of what travels between two ranks."""
        dims = [count, *first.shape]
        dims[1 + share_dim], dims[1 + join_dim] = share, join
        return dims

    rank = group.rank()
    sent = [shape(share, joins[rank]) for share in shares]
    received = [shape(shares[rank], join) for join in joins]
    sent_sizes, received_sizes = [math.prod(dims) for dims in sent], [math.prod(dims) for dims in received]
    out, back = first.new_empty(sum(sent_sizes)), first.new_empty(sum(received_sizes))
    pieces = zip(*(torch.split(value, shares, share_dim) for value in values), strict=True)
    for buffer, dims, of_values in zip(torch.split(out, sent_sizes), sent, pieces, strict=True):
        torch.stack(of_values, out=buffer.view(dims))
    group.alltoall_base(back, out, received_sizes, sent_sizes).wait()
    parts_of = [buffer.view(dims) for buffer, dims in zip(torch.split(back, received_sizes), received, strict=True)]
    return tuple(torch.cat([part[index] for part in parts_of], dim=join_dim) for index in range(count))


class _Gather(torch.autograd.Function):
    """All ranks' parts, joined along the tokens. Each rank takes back the gradient of its own part.

    Parts are padded to the longest one: gloo gathers equal shapes only.
    """

    @staticmethod
    def forward(ctx: Any, part_BLC: Tensor, lengths: list[int], group: Group) -> Tensor:
        ctx.lengths, ctx.rank = lengths, group.rank()
        batch, length, width = part_BLC.shape
        padded_BLC = part_BLC.new_zeros(batch, max(lengths), width)
        padded_BLC[:, :length] = part_BLC
        gathered = [torch.empty_like(padded_BLC) for _ in lengths]
        group.allgather([gathered], [padded_BLC]).wait()
        return torch.cat([part[:, :length] for part, length in zip(gathered, lengths, strict=True)], dim=1)

    @staticmethod
    def backward(ctx: Any, gradient_BLC: Tensor) -> Any:
        return torch.split(gradient_BLC, ctx.lengths, 1)[ctx.rank], None, None
