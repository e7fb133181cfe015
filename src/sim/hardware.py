"""What work takes on GPUs that are not here: seconds of every operation, each number with its source.

A profile is for one model at one resolution on one kind of GPU. Work is linear in images and steps: batches are taken
to be large enough to fill the GPU. conf/hardware holds the profiles; each number there says what it rests on:

    published   stands so in the source
    derived     follows from published numbers by the arithmetic that the source states
    assumed     ours; a sensitivity sweep moves it (`scaled`)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

Tag = Literal["published", "derived", "assumed"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number, and why it should be believed.

    Raises:
        ValueError: the value is not positive and finite, the tag is unknown or the source is empty.
    """

    value: float
    source: str
    tag: Tag

    def __post_init__(self) -> None:
        if not 0 < self.value < math.inf:
            raise ValueError(f"value must be positive and finite, got {self.value}")
        if self.tag not in get_args(Tag):
            raise ValueError(f"tag must be one of {', '.join(get_args(Tag))}, got {self.tag!r}")
        if not self.source.strip():
            raise ValueError("source must say where the value comes from, got nothing")


class Row(NamedTuple):
    """A line of a profile's table."""

    name: str
    value: float
    unit: str
    tag: Tag
    source: str


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A profile. Its figures, with their units, are per GPU and without guidance where nothing else is said."""

    name: str
    denoise: Annotated[Figure, "GPU s / image / step"]
    """One forward pass, with its share of text encoding and VAE decoding."""
    decode_score: Annotated[Figure, "GPU s / image"]
    """From latents to a reward, as far as `denoise` does not hold it."""
    train: Annotated[Figure, "GPU s / image / trained step"]
    """Old log-probabilities, forward, backward with recomputation, and the sample's share of the optimizer step."""
    train_gpus: Annotated[Figure, "GPUs"]
    """On how many `train` was measured."""
    train_overhead: Annotated[Figure, "per doubling of GPUs"]
    """Share of GPU time that each doubling of GPUs adds, beyond `train_gpus`."""
    sp1_latency: Annotated[Figure, "s"]
    sp2_latency: Annotated[Figure, "s"]
    sp4_latency: Annotated[Figure, "s"]
    """One image on 1, 2 and 4 GPUs that share its sequence; only their ratios count."""
    publish: Annotated[Figure, "s"]
    """The trainer hands out new weights."""
    load: Annotated[Figure, "s"]
    """A worker takes them."""
    regroup: Annotated[Figure, "s"]
    """Survivors of a group form a new one."""
    cold_start: Annotated[Figure, "s"]
    """A new process until its first forward pass: imports, model, weights, group."""
    commit: Annotated[Figure, "s"]
    """Latents of samples in flight go to the coordinator."""

    def denoise_s(self, images: float, steps: float, *, degree: int = 1, guidance: bool) -> float:
        """Seconds in which one worker of `degree` GPUs takes `images` images through `steps` steps.

        images steps (2 with guidance) denoise / speedup(degree)
        """
        return images * steps * _passes(guidance) * self.denoise.value / self.sp_speedup(degree)

    def sp_speedup(self, degree: int) -> float:
        """How much sooner one image is ready on `degree` GPUs; 3 is interpolated, in the logarithm of both.

        Raises:
            ValueError: degree is outside 1..4, where nothing is known.
        """
        if not 1 <= degree <= 4:
            raise ValueError(f"degree must be within 1..4, got {degree}")
        two, four = (self.sp1_latency.value / latency.value for latency in (self.sp2_latency, self.sp4_latency))
        doublings = math.log2(degree)
        return float(two**doublings if doublings <= 1 else two * (four / two) ** (doublings - 1))

    def decode_score_s(self, images: float) -> float:
        """Seconds in which one GPU gives `images` images their rewards."""
        return images * self.decode_score.value

    def train_s(self, images: float, trained_steps: float, *, gpus: int, guidance: bool) -> float:
        """Seconds of an iteration's training on `gpus` GPUs.

        images trained_steps (2 with guidance) train (1 + train_overhead)^max(0, log2(gpus / train_gpus)) / gpus
        """
        if gpus < 1:
            raise ValueError(f"gpus must be at least 1, got {gpus}")
        doublings = max(0.0, math.log2(gpus / self.train_gpus.value))
        gpu_s = images * trained_steps * _passes(guidance) * self.train.value
        return float(gpu_s * (1 + self.train_overhead.value) ** doublings / gpus)

    @property
    def publish_s(self) -> float:
        return self.publish.value

    @property
    def load_s(self) -> float:
        return self.load.value

    @property
    def regroup_s(self) -> float:
        return self.regroup.value

    @property
    def cold_start_s(self) -> float:
        return self.cold_start.value

    @property
    def commit_s(self) -> float:
        return self.commit.value

    @property
    def assumed(self) -> tuple[str, ...]:
        """Names of the figures that a sensitivity sweep should move."""
        return tuple(name for name, figure in self._figures().items() if figure.tag == "assumed")

    def scaled(self, **factors: float) -> Hardware:
        """This profile with figures multiplied, as `scaled(cold_start=2, publish=0.5)`.

        Raises:
            ValueError: there is no such figure, or the result is impossible.
        """
        figures = self._figures()
        if unknown := sorted(factors.keys() - figures.keys()):
            raise ValueError(f"no figure is called {', '.join(unknown)}; there are {', '.join(figures)}")
        moved: dict[str, Any] = {
            name: replace(figures[name], value=figures[name].value * factor) for name, factor in factors.items()
        }
        return replace(self, **moved)

    def table(self) -> list[Row]:
        """All figures in order, for documents."""
        return [Row(name, it.value, UNITS[name], it.tag, it.source) for name, it in self._figures().items()]

    def _figures(self) -> dict[str, Figure]:
        return {name: getattr(self, name) for name in UNITS}


UNITS: Mapping[str, str] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Hardware, include_extras=True).items()
    if get_origin(hint) is Annotated
}
"""Names of a profile's figures, in order, and their units."""


def profile(*, name: str, figures: Mapping[str, Mapping[str, Any]]) -> Hardware:
    """A profile from `figures`: name -> value, tag, source.

    Raises:
        ValueError: a figure is missing, unknown or impossible; the message names profile and figure.
    """
    if missing := [figure for figure in UNITS if figure not in figures]:
        raise ValueError(f"profile {name} must have the figures {', '.join(missing)}")
    if unknown := sorted(figures.keys() - UNITS.keys()):
        raise ValueError(f"profile {name} has unknown figures {', '.join(unknown)}; there are {', '.join(UNITS)}")
    built: dict[str, Any] = {}
    for figure, parts in figures.items():
        try:
            built[figure] = Figure(**parts)
        except (TypeError, ValueError) as error:
            raise ValueError(f"figure {figure} of profile {name}: {error}") from error
    return Hardware(name=name, **built)


def _passes(guidance: bool) -> int:
    """Forward passes per step: classifier-free guidance runs a second one, without the prompt."""
    return 2 if guidance else 1
