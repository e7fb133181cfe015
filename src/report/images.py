"""Held-out images before and after training, inside the page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from src.report.html import section
from src.report.read import Picture

SHOWN_PAIRS = 24
"""Pairs of pictures on the page; the run folder has them all."""

STORED_PX = 384
"""Larger pictures are scaled down to this edge before they are put into the page."""


def images(pictures: Sequence[Picture]) -> str:
    """Pairs of equal prompt and seed, before and after training, in the order of the evaluation set."""
    if not pictures:
        return ""
    first, last = pictures[0].iteration, pictures[-1].iteration
    before = {picture.index: picture for picture in pictures if picture.iteration == first}
    after = {picture.index: picture for picture in pictures if picture.iteration == last}
    shown = sorted(before.keys() & after.keys())[:SHOWN_PAIRS]
    cards = "".join(_pair(before[index], after[index]) for index in shown)
    note = (
        f"Each pair: before training, then after {last} iterations, with equal prompt and seed; "
        f"the first {len(shown)} of {len(before)} held-out images, not chosen. Numbers are rewards."
    )
    return section("Before and after", f'<p class="note">{note}</p><ul class="pairs">{cards}</ul>')


def _pair(before: Picture, after: Picture) -> str:
    better = "up" if after.reward > before.reward else ""
    sides = (
        f"<div>{_image(before, 'before')}<span>{before.reward:.2f}</span></div>"
        f'<div>{_image(after, "after")}<span class="{better}">{after.reward:.2f}</span></div>'
    )
    shape = "pair stacked" if _is_wide(before.path) else "pair"
    return f'<li><div class="{shape}">{sides}</div><p>{escape(before.prompt)}</p></li>'


def _is_wide(path: Path) -> bool:
    try:
        with Image.open(path) as image:
            return image.width > 1.5 * image.height
    except (OSError, UnidentifiedImageError):
        return False


def _image(picture: Picture, when: str) -> str:
    alt = escape(f"{when} training: {picture.prompt}, reward {picture.reward:.2f}")
    try:
        return f'<img alt="{alt}" src="{data_uri(picture.path)}">'
    except (OSError, UnidentifiedImageError):
        return f'<div class="missing" role="img" aria-label="{alt}">no image</div>'


def data_uri(path: Path) -> str:
    """The image file as a PNG data URI, scaled down if it is larger than the page needs.

    Raises:
        OSError: it cannot be read, or is no image.
    """
    with Image.open(path) as image:
        image.thumbnail((STORED_PX, STORED_PX))
        stored = io.BytesIO()
        image.save(stored, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stored.getvalue()).decode("ascii")
