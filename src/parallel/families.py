"""Applies sequence parallelism to single-device diffusion transformers of diffusers, from outside.

    group = SequenceGroup()
    parallelize(transformer, group)          # once; alone, it computes what it did before
    group.enter(process_group)               # from now on, each rank of it computes its part of the tokens

Per model family one function places what they all consist of: the streams (text and image) are sharded where the
blocks begin, attention goes through the group, and the image's output is gathered where they end. Each stream is
sharded by itself, so that all ranks have equal shares of both sets of weights.

The lengths of the whole streams reach attention as a keyword argument through the model's own blocks, not by a
variable: with gradient checkpointing a block may run again when the model has long been called with other lengths.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen
from torch import Tensor, nn

from src.parallel.ulysses import SequenceGroup


def parallelize(transformer: nn.Module, group: SequenceGroup) -> None:
    """Has the transformer share its sequences with `group`, whatever that consists of at each forward pass.

    Raises:
        ValueError: nothing is known about this kind of transformer.
    """
    for model, apply in FAMILIES.items():
        if isinstance(transformer, model):
            return apply(transformer, group)
    known = sorted(model.__name__ for model in FAMILIES)
    raise ValueError(f"no sequence parallelism for {type(transformer).__name__}, known: {known}")


# ---------------------------------------------------------------------------- Qwen-Image


def _qwen_image(model: nn.Module, group: SequenceGroup) -> None:
    """The model itself needs the whole text (its length decides the rotary positions), so the blocks get the parts."""
    attention = QwenImageAttention(group)
    for block in model.transformer_blocks:  # type: ignore[union-attr]
        block.attn.set_processor(attention)
    ends = _Ends(group)

    def before_model(call: dict[str, Any]) -> None:
        lengths = ends.note(call["encoder_hidden_states"].shape[1], call["hidden_states"].shape[1])
        call["attention_kwargs"] = {**(call["attention_kwargs"] or {}), "lengths": lengths}

    _before(model, before_model)
    _before(model.transformer_blocks[0], ends.shard)  # type: ignore[index]
    _after(model.pos_embed, lambda rotary: tuple(group.shard(positions, 0) for positions in rotary))
    _after(model.proj_out, ends.gather)


class QwenImageAttention:
    """Joint attention of text and image; the order of the streams is that of diffusers: text first."""

    def __init__(self, group: SequenceGroup) -> None:
        self._group = group

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        *,
        lengths: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        text, image = _text_qkv(attn, encoder_hidden_states), _image_qkv(attn, hidden_states)
        if image_rotary_emb is not None:
            text = _rotated(text, lambda x: apply_rotary_emb_qwen(x, image_rotary_emb[1], use_real=False))
            image = _rotated(image, lambda x: apply_rotary_emb_qwen(x, image_rotary_emb[0], use_real=False))
        mask_BL = None
        if encoder_hidden_states_mask is not None:
            real_BL = encoder_hidden_states_mask.new_ones(len(hidden_states), lengths[1])
            mask_BL = torch.cat([encoder_hidden_states_mask, real_BL], dim=1)
        joint_BLC = self._group.attention(*_joined(text, image), lengths=lengths, mask_BL=mask_BL).flatten(2)
        text_BLC, image_BLC = torch.split(joint_BLC, [encoder_hidden_states.shape[1], hidden_states.shape[1]], dim=1)
        return _image_output(attn, image_BLC), attn.to_add_out(text_BLC.contiguous())


# ---------------------------------------------------------------------------- Flux


def _flux(model: nn.Module, group: SequenceGroup) -> None:
    """All that has tokens is sharded where it enters the model."""
    attention = FluxAttention(group)
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):  # type: ignore[misc]
        block.attn.set_processor(attention)
    ends = _Ends(group)

    def before_model(call: dict[str, Any]) -> None:
        lengths = ends.note(call["encoder_hidden_states"].shape[1], call["hidden_states"].shape[1])
        call["joint_attention_kwargs"] = {**(call["joint_attention_kwargs"] or {}), "lengths": lengths}
        ends.shard(call)
        call["txt_ids"], call["img_ids"] = group.shard(call["txt_ids"], 0), group.shard(call["img_ids"], 0)

    _before(model, before_model)
    _after(model.proj_out, ends.gather)


class FluxAttention:
    """Joint attention in the double blocks; in the single blocks text and image already come as one, text first."""

    def __init__(self, group: SequenceGroup) -> None:
        self._group = group

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        *,
        lengths: tuple[int, int],
    ) -> Tensor | tuple[Tensor, Tensor]:
        qkv = _image_qkv(attn, hidden_states)
        if encoder_hidden_states is not None:
            qkv = _joined(_text_qkv(attn, encoder_hidden_states), qkv)
        if image_rotary_emb is not None:
            qkv = _rotated(qkv, lambda x: apply_rotary_emb(x, image_rotary_emb, sequence_dim=1))
        joint_BLC = self._group.attention(*qkv, lengths=lengths).flatten(2)
        if encoder_hidden_states is None:
            return joint_BLC
        text_BLC, image_BLC = torch.split(joint_BLC, [encoder_hidden_states.shape[1], hidden_states.shape[1]], dim=1)
        return _image_output(attn, image_BLC), attn.to_add_out(text_BLC.contiguous())


# ---------------------------------------------------------------------------- Stable Diffusion 3


def _sd3(model: nn.Module, group: SequenceGroup) -> None:
    """Latents enter as images: only the blocks know tokens."""
    attention = SD3Attention(group)
    for block in model.transformer_blocks:  # type: ignore[union-attr]
        block.attn.set_processor(attention)
        if block.attn2 is not None:
            block.attn2.set_processor(attention)
    ends = _Ends(group)

    def before_model(call: dict[str, Any]) -> None:
        height, width = call["hidden_states"].shape[-2:]
        patch = model.config.patch_size  # type: ignore[union-attr]
        image = (height // patch) * (width // patch)
        lengths = ends.note(call["encoder_hidden_states"].shape[1], image)
        call["joint_attention_kwargs"] = {**(call["joint_attention_kwargs"] or {}), "lengths": lengths}

    _before(model, before_model)
    _before(model.transformer_blocks[0], ends.shard)  # type: ignore[index]
    _after(model.proj_out, ends.gather)


class SD3Attention:
    """Joint attention, image first as in diffusers; or attention of the image alone (dual blocks of SD 3.5)."""

    def __init__(self, group: SequenceGroup) -> None:
        self._group = group

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None,
        *,
        lengths: tuple[int, int],
    ) -> Tensor | tuple[Tensor, Tensor]:
        image = _image_qkv(attn, hidden_states)
        if encoder_hidden_states is None:
            return _image_output(attn, self._group.attention(*image, lengths=lengths[1:]).flatten(2))
        joint = _joined(image, _text_qkv(attn, encoder_hidden_states))
        joint_BLC = self._group.attention(*joint, lengths=lengths[::-1]).flatten(2)
        image_BLC, text_BLC = torch.split(joint_BLC, [hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        return _image_output(attn, image_BLC), text_BLC if attn.context_pre_only else attn.to_add_out(text_BLC)


FAMILIES: Mapping[type[nn.Module], Callable[[nn.Module, SequenceGroup], None]] = {
    diffusers.QwenImageTransformer2DModel: _qwen_image,
    diffusers.FluxTransformer2DModel: _flux,
    diffusers.SD3Transformer2DModel: _sd3,
}
"""What is known, by the model's class."""


# ---------------------------------------------------------------------------- what they consist of

_QKV = tuple[Tensor, Tensor, Tensor]


class _Ends:
    """Where the sharded part of a model begins and ends."""

    def __init__(self, group: SequenceGroup) -> None:
        self._group = group
        self._image = 0

    def note(self, text: int, image: int) -> tuple[int, int]:
        """Keeps the image's whole length for `gather`, in the same forward pass."""
        self._image = image
        return text, image

    def shard(self, call: dict[str, Any]) -> None:
        for stream in ("hidden_states", "encoder_hidden_states"):
            call[stream] = self._group.shard(call[stream], 1)

    def gather(self, image_BLC: Tensor) -> Tensor:
        return self._group.gather(image_BLC, self._image)


def _image_qkv(attn: Any, image_BLC: Tensor) -> _QKV:
    return _qkv(attn, image_BLC, (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k))


def _text_qkv(attn: Any, text_BLC: Tensor) -> _QKV:
    return _qkv(
        attn, text_BLC, (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj), (attn.norm_added_q, attn.norm_added_k)
    )


def _qkv(attn: Any, x_BLC: Tensor, projections: tuple[Any, Any, Any], norms: tuple[Any, Any]) -> _QKV:
    q, k, v = (project(x_BLC).unflatten(-1, (attn.heads, -1)) for project in projections)
    norm_q, norm_k = norms
    return (q if norm_q is None else norm_q(q)), (k if norm_k is None else norm_k(k)), v


def _rotated(qkv: _QKV, rotate: Callable[[Tensor], Tensor]) -> _QKV:
    q, k, v = qkv
    if q.numel() == 0:  # a rank without tokens of this stream: diffusers cannot rotate nothing
        return qkv
    return rotate(q), rotate(k), v


def _joined(first: _QKV, second: _QKV) -> _QKV:
    q, k, v = (torch.cat(pair, dim=1) for pair in zip(first, second, strict=True))
    return q, k, v


def _image_output(attn: Any, image_BLC: Tensor) -> Tensor:
    project, dropout = attn.to_out
    output: Tensor = dropout(project(image_BLC.contiguous()))
    return output


def _before(module: Any, change: Callable[[dict[str, Any]], None]) -> None:
    """Has `change` alter the arguments of the module's forward pass, by name."""
    signature = inspect.signature(module.forward)

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        change(bound.arguments)
        return (), dict(bound.arguments)

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _after(module: Any, change: Callable[[Any], Any]) -> None:
    """Has `change` alter what the module's forward pass returns."""
    module.register_forward_hook(lambda module, args, output: change(output))
