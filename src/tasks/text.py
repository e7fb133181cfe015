"""Short strings drawn with real fonts: the text-rendering task, and its digits variant for fast tests."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from src.core.types import Prompt

PROMPT_SEED = 20_260
"""Seed of the prompt sets."""

SYMBOLS = "0123456789ABCDEFGHJKLMNPRSTUVXYZ"
"""Digits and capitals without I, O, Q and W, which small fonts make too like 1, 0, 0 and VV."""

INK = 25
"""Grey level from which a pixel counts as ink when a glyph is cropped."""


@dataclass(frozen=True)
class Typeface:
    """A font file of matplotlib's data folder and its size in pixels."""

    file: str
    size: int


def font_folder() -> Path:
    """The folder of the DejaVu fonts that the matplotlib package carries (the system may have none).

    Raises:
        FileNotFoundError: matplotlib is not installed.
    """
    spec = importlib.util.find_spec("matplotlib")  # finds the package without the cost of importing it
    if spec is None or spec.origin is None:
        raise FileNotFoundError("matplotlib, whose fonts the text task draws with, is not installed")
    return Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"


def draw_glyphs(face: Typeface, alphabet: str, max_width: int) -> dict[str, NDArray[np.uint8]]:
    """Draw each symbol on a shared baseline, cropped to its ink; wider ones are squeezed to `max_width`."""
    font = ImageFont.truetype(str(font_folder() / face.file), face.size, layout_engine=ImageFont.Layout.BASIC)
    canvas = (3 * face.size, 3 * face.size)
    drawn = {}
    for symbol in alphabet:
        image = Image.new("L", canvas)
        ImageDraw.Draw(image).text((face.size, face.size), symbol, fill=255, font=font)
        drawn[symbol] = np.asarray(image)
    rows = np.flatnonzero(np.max([ink.max(axis=1) for ink in drawn.values()], axis=0) > INK)
    glyphs = {}
    for symbol, ink in drawn.items():
        columns = np.flatnonzero(ink.max(axis=0) > INK)
        glyph = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        if glyph.shape[1] > max_width:
            squeezed = Image.fromarray(glyph).resize((max_width, glyph.shape[0]), Image.Resampling.BILINEAR)
            glyph = np.asarray(squeezed)
        glyphs[symbol] = glyph
    return glyphs


class TextTask:
    """Strings of `length` symbols, white on black, in a random typeface at a random place.

    A prompt's text is the string; `metadata["target"]` repeats it for the OCR reward.

    Args:
        name: name of the task.
        alphabet: the symbols.
        length: symbols per string.
        height, width: image size in pixels; every string must fit.
        typefaces: fonts to draw from, uniformly.
        train_size, heldout_size: sizes of the disjoint prompt sets.

    Raises:
        ValueError: more prompts asked for than strings exist, or the strings cannot fit the image.
    """

    def __init__(
        self,
        *,
        name: str = "text",
        alphabet: str = SYMBOLS,
        length: int = 4,
        height: int = 16,
        width: int = 32,
        typefaces: Sequence[Typeface] = (
            Typeface("DejaVuSansMono-Bold.ttf", 12),
            Typeface("DejaVuSerif-Bold.ttf", 10),
            Typeface("DejaVuSansMono.ttf", 12),
        ),
        train_size: int = 3744,
        heldout_size: int = 256,
    ) -> None:
        total = len(alphabet) ** length
        if train_size + heldout_size > total:
            raise ValueError(f"train_size + heldout_size must be at most {total}, the number of strings")
        self.name = name
        self.alphabet = alphabet
        self.length = length
        self.image_size = (height, width, 1)
        self._fonts = [draw_glyphs(face, alphabet, max_width=width // length) for face in typefaces]
        tallest = max(glyph.shape[0] for font in self._fonts for glyph in font.values())
        if tallest > height:
            raise ValueError(f"height must be at least {tallest}, the height of the tallest glyph")
        codes = np.random.default_rng(PROMPT_SEED).choice(total, train_size + heldout_size, replace=False)
        self._heldout_codes = [int(code) for code in codes[:heldout_size]]
        self._train_codes = [int(code) for code in codes[heldout_size:]]

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return tuple(self.alphabet)

    @property
    def max_tokens(self) -> int:
        return self.length

    @cached_property
    def train_prompts(self) -> Sequence[Prompt]:
        return tuple(self._prompt(index, code) for index, code in enumerate(self._train_codes))

    @cached_property
    def heldout_prompts(self) -> Sequence[Prompt]:
        return tuple(self._prompt(index, code) for index, code in enumerate(self._heldout_codes))

    @cached_property
    def _heldout_set(self) -> frozenset[int]:
        return frozenset(self._heldout_codes)

    def _prompt(self, index: int, code: int) -> Prompt:
        """The prompt whose string is `code` written in base len(alphabet), most significant symbol first."""
        base = len(self.alphabet)
        text = "".join(self.alphabet[code // base**place % base] for place in reversed(range(self.length)))
        return Prompt(id=index, text=text, metadata={"target": text})

    def sample_prompt(self, rng: np.random.Generator) -> Prompt:
        while True:
            code = int(rng.integers(len(self.alphabet) ** self.length))
            if code not in self._heldout_set:
                return self._prompt(code, code)

    def render(self, prompt: Prompt, rng: np.random.Generator) -> NDArray[np.uint8]:
        font = self._fonts[rng.integers(len(self._fonts))]
        glyphs = [font[symbol] for symbol in prompt.text]
        return self._place(glyphs, rng)

    def _place(self, glyphs: Sequence[NDArray[np.uint8]], rng: np.random.Generator) -> NDArray[np.uint8]:
        """Set the glyphs side by side, one pixel apart where there is room, at a random place."""
        height, width, _ = self.image_size
        ink = sum(glyph.shape[1] for glyph in glyphs)
        gap = 1 if ink + len(glyphs) - 1 <= width else 0
        left = int(rng.integers(width - ink - gap * (len(glyphs) - 1) + 1))
        top = int(rng.integers(height - glyphs[0].shape[0] + 1))
        image = np.zeros(self.image_size, np.uint8)
        for glyph in glyphs:
            image[top : top + glyph.shape[0], left : left + glyph.shape[1], 0] = glyph
            left += glyph.shape[1] + gap
        return image


def digits_task() -> TextTask:
    """Three digits on 12x24 pixels: small enough to train on within a test."""
    return TextTask(
        name="digits",
        alphabet="0123456789",
        length=3,
        height=12,
        width=24,
        typefaces=(Typeface("DejaVuSansMono-Bold.ttf", 10), Typeface("DejaVuSerif-Bold.ttf", 10)),
        train_size=800,
        heldout_size=200,
    )
