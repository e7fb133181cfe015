"""What a published model takes on a GPU, found without its weights: its own code runs on the meta device.

Activations are what a forward pass leaves alive for the backward pass, and what that one adds on top of it at its
worst moment. Both are counted while they happen, with and without gradient checkpointing, on a model of a few blocks.
The blocks of a kind are alike but for the first and the last, so what is left alive is linear in their numbers n >= 2:

    f(n) = f(2) + sum over kinds (n - 2) df     df: what one more block of the kind makes

Attention is taken to be one fused kernel. What lives only within an operation, the CUDA context (about 0.5 GB) and the
gaps of the allocator are not counted.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from src.models.adapter import Conditioning, DiTAdapter
from src.models.flux import FluxAdapter, flux_family
from src.models.lora import apply_lora
from src.models.pipelines import DTYPES, Family, PipelineSettings
from src.models.qwen_image import QwenImageAdapter, VelocityPrediction, qwen_image_family
from src.models.sd3 import SD3Adapter, sd3_family

META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes of a published model, as in the `config.json` files of its repository.

    Args:
        family: its diffusers classes.
        adapter: its adapter, around the parts that `Family.open` would give.
        blocks: number of its blocks by kind.
        heads: of each attention.
        transformer: number of blocks by kind -> arguments of the transformer's class.
        vae: arguments of the VAE's class.
        encoder_parameters: of all its text encoders.
        text: width D of the text tokens, tokens beside `prompt_tokens`, and width of the pooled vector (0: none).
    """

    family: Callable[[], Family]
    adapter: Callable[..., DiTAdapter]
    blocks: Mapping[str, int]
    heads: int
    transformer: Callable[[Mapping[str, int]], dict[str, Any]]
    vae: Mapping[str, Any]
    encoder_parameters: int
    text: tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Sizes of a model with a LoRA adapter, and of one forward and backward pass of `rows` rows.

    Args:
        parameters: of the transformer with its buffers, without the adapter. adapter: those of the adapter, fp32.
        transformer_bytes: of `parameters`.
        tokens: image and text tokens of a row. latent_values: L C of an image.
        passes: rows of the network's per row: 2 with classifier-free guidance.
        plain_bytes, checkpointed_bytes: activations without and with gradient checkpointing.
        vae_bytes: weights of the VAE, fp32. decode_bytes: at most alive beside them while images are decoded.
        encoder_bytes: weights of the text encoders. prompt_bytes: one encoded prompt.
    """

    parameters: int
    adapter: int
    transformer_bytes: int
    tokens: int
    latent_values: int
    passes: int
    plain_bytes: int
    checkpointed_bytes: int
    vae_bytes: int
    decode_bytes: int
    encoder_bytes: int
    prompt_bytes: int


def footprint(
    architecture: Architecture, settings: PipelineSettings, lora: Mapping[str, Any], *, rows: int, guidance_scale: float
) -> Footprint:
    """The sizes of a model; classifier-free guidance makes two rows of the network's out of each of `rows`."""

    def measured(blocks: Mapping[str, int]) -> Counter[str]:
        return _measured(_adapter(architecture, blocks, settings, lora), rows, guidance_scale)

    least = dict.fromkeys(architecture.blocks, 2)
    first = measured(least)
    sizes = Counter(first)
    for kind, count in architecture.blocks.items():
        more = measured({**least, kind: 3})
        for name in LINEAR:
            sizes[name] += (count - 2) * (more[name] - first[name])
    item = DTYPES[settings.dtype].itemsize
    vae_bytes, decode_bytes = _decoding(architecture, settings)
    width, extra, pooled = architecture.text
    return Footprint(
        parameters=sizes["parameters"],
        adapter=sizes["adapter"],
        transformer_bytes=sizes["transformer"],
        tokens=settings.grid[0] * settings.grid[1] + settings.prompt_tokens + extra,
        latent_values=sizes["latent"],
        passes=sizes["passes"],
        plain_bytes=sizes["plain"] + sizes["plain_peak"],
        checkpointed_bytes=sizes["checkpointed"] + sizes["checkpointed_peak"],
        vae_bytes=vae_bytes,
        decode_bytes=decode_bytes,
        encoder_bytes=architecture.encoder_parameters * item,
        prompt_bytes=((settings.prompt_tokens + extra) * width + pooled) * item,
    )


# -------------------------------------------------------------------- the training pass


LINEAR = ("parameters", "transformer", "adapter", "plain", "checkpointed")
"""Sizes that grow with the number of blocks."""


def _measured(adapter: DiTAdapter, rows: int, guidance_scale: float) -> Counter[str]:
    """Sizes of a model, and bytes of its activations: between the passes, and the most that backward adds to them."""
    transformer: Any = adapter.transformer
    frozen = [tensor for tensor in (*transformer.parameters(), *transformer.buffers()) if not tensor.requires_grad]
    trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    counts = Counter(
        parameters=sum(tensor.numel() for tensor in frozen),
        transformer=sum(tensor.nbytes for tensor in frozen),
        adapter=sum(parameter.numel() for parameter in trained),
    )
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)  # gradients are counted elsewhere

    def count_passes(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        counts["passes"] = len(kwargs["hidden_states"]) // rows

    transformer.register_forward_pre_hook(count_passes, with_kwargs=True)
    latents_BLC = torch.empty(rows, *adapter.latent_shape, device=META)
    counts["latent"] = latents_BLC[0].numel()
    cond = adapter.prompt_encoder.encode([""] * rows)
    for name in ("plain", "checkpointed"):
        if name == "checkpointed":
            transformer.enable_gradient_checkpointing()
        with fused_attention(), LiveBytes() as live:
            output_BLC = adapter.velocity(
                latents_BLC, torch.empty(rows, device=META), cond, guidance_scale=guidance_scale
            )
            counts[name] = live.now
            output_BLC.sum().backward()  # type: ignore[no-untyped-call]
        counts[f"{name}_peak"] = live.peak - counts[name]
    return counts


def _adapter(
    architecture: Architecture, blocks: Mapping[str, int], settings: PipelineSettings, lora: Mapping[str, Any]
) -> DiTAdapter:
    """The model with so many blocks of each kind and LoRA, without weights and frozen parts."""
    with META:
        transformer = architecture.family().transformer(**architecture.transformer(blocks))
    for tensor in (*transformer.parameters(), *transformer.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(DTYPES[settings.dtype])
    apply_lora(transformer, **lora)
    return architecture.adapter(
        transformer=transformer,
        prompt_encoder=_BlankEncoder(architecture, settings),
        image_decoder=None,
        height=settings.height,
        width=settings.width,
        negative_prompt=" ",
    )


class _BlankEncoder:
    """Encoded prompts without content."""

    def __init__(self, architecture: Architecture, settings: PipelineSettings) -> None:
        self._width, extra, self._pooled = architecture.text
        self._tokens = settings.prompt_tokens + extra
        self._dtype = DTYPES[settings.dtype]

    def encode(self, prompts: Sequence[str]) -> Conditioning:
        rows = len(prompts)
        return Conditioning(
            torch.empty(rows, self._tokens, self._width, dtype=self._dtype, device=META),
            torch.empty(rows, self._tokens, dtype=torch.bool, device=META),
            torch.empty(rows, self._pooled, dtype=self._dtype, device=META) if self._pooled else None,
        )


@contextmanager
def fused_attention() -> Iterator[None]:
    """Attention as a fused kernel: it saves queries, keys, values, output and one number per row and head.

    The meta device would save the probabilities of all pairs of tokens.
    """
    functional: Any = nn.functional
    original = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = _attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    output: Tensor = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return output


class _Attention(torch.autograd.Function):
    """The sizes of attention, without its arithmetic."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


# -------------------------------------------------------------------- decoding


def _decoding(architecture: Architecture, settings: PipelineSettings) -> tuple[int, int]:
    """Bytes of the VAE's weights, and the most that is alive beside them while a batch of images is decoded untiled."""
    family = architecture.family()
    with META:
        vae = family.vae(**architecture.vae)
    rows, columns = settings.grid
    channels: int = vae.config.get("latent_channels") or vae.config.z_dim
    latents_BCHW = torch.empty(settings.vae_batch, channels, 2 * rows, 2 * columns, device=META)
    with torch.no_grad(), fused_attention(), LiveBytes() as live:
        family.decode(vae, latents_BCHW)
    return sum(parameter.nbytes for parameter in vae.parameters()), live.peak


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are made inside; `peak` is the most that was alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and _storage(leaf) not in given | self._known:
                self._add(leaf)
        return output

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        identity, size = _storage(tensor), storage.nbytes()
        self._known.add(identity)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, identity, size)

    def _remove(self, identity: Any, size: int) -> None:
        self._known.discard(identity)
        self.now -= size


def _storage(tensor: Tensor) -> Any:
    """Which memory a tensor looks at."""
    return tensor.untyped_storage()._cdata


# -------------------------------------------------------------------- published models


def _qwen_image(**parts: Any) -> DiTAdapter:
    return QwenImageAdapter(**parts, patch=16, prediction=VelocityPrediction())


def _sd3(**parts: Any) -> DiTAdapter:
    tokens = parts["height"] // 16 * (parts["width"] // 16)
    return SD3Adapter(**parts, latent_shape=(tokens, parts["transformer"].config.in_channels * 4))


def _flux(**parts: Any) -> DiTAdapter:
    tokens = parts["height"] // 16 * (parts["width"] // 16)
    return FluxAdapter(**parts, latent_shape=(tokens, parts["transformer"].config.in_channels))


_KL_VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "scaling_factor": 1.0,
    "shift_factor": 0.0,
}
_T5_XXL, _CLIP_L, _CLIP_L_PROJECTED, _CLIP_G = 4_762_310_656, 123_060_480, 123_650_304, 694_659_840

ARCHITECTURES: Mapping[str, Architecture] = {
    "Qwen/Qwen-Image": Architecture(
        family=qwen_image_family,
        adapter=_qwen_image,
        blocks={"double": 60},
        heads=24,
        transformer=lambda blocks: {"num_layers": blocks["double"]},  # all else are the class's defaults
        vae={},
        encoder_parameters=8_292_166_656,  # Qwen2.5-VL-7B with its vision tower
        text=(3584, 0, 0),
    ),
    "stabilityai/stable-diffusion-3.5-medium": Architecture(
        family=sd3_family,
        adapter=_sd3,
        blocks={"dual": 13, "single": 11},
        heads=24,
        transformer=lambda blocks: {
            "sample_size": 128,
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": blocks["dual"] + blocks["single"],
            "dual_attention_layers": tuple(range(blocks["dual"])),
            "num_attention_heads": 24,
            "attention_head_dim": 64,
            "joint_attention_dim": 4096,
            "caption_projection_dim": 1536,
            "pooled_projection_dim": 2048,
            "pos_embed_max_size": 384,
            "qk_norm": "rms_norm",
        },
        vae=_KL_VAE,
        encoder_parameters=_T5_XXL + _CLIP_L_PROJECTED + _CLIP_G,
        text=(4096, 77, 2048),
    ),
    "black-forest-labs/FLUX.1-dev": Architecture(
        family=flux_family,
        adapter=_flux,
        blocks={"double": 19, "single": 38},
        heads=24,
        transformer=lambda blocks: {
            "num_layers": blocks["double"],
            "num_single_layers": blocks["single"],
            "guidance_embeds": True,
        },
        vae=_KL_VAE,
        encoder_parameters=_T5_XXL + _CLIP_L,
        text=(4096, 0, 768),
    ),
}
"""By the id on the Hugging Face hub; the sizes are those of its config.json files."""
