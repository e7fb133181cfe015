"""Prompts that ask for a text in a picture: scenes by template to train on, Flow-GRPO's set to evaluate on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from src.core.types import Prompt
from src.tasks.prompt_sets import read_prompts

PROMPT_SEED = 20_262

SCENES = (
    'A wooden sign at the edge of a forest that reads "{}", in morning fog.',
    'A neon sign above a night market stall with the words "{}", reflected in wet asphalt.',
    'A chalkboard in a small cafe with "{}" written on it in white chalk.',
    'A close-up of a brass plate on an old door, engraved with "{}".',
    'A hand-painted banner across a village street, saying "{}".',
    'A vintage travel poster of a coastal town with the title "{}".',
    'A road sign in the desert that says "{}", under a clear sky.',
    'A birthday cake with "{}" in icing, on a kitchen table.',
    'A delivery truck with "{}" in large letters on its side, parked at a dock.',
    'The cover of a paperback novel titled "{}", lying on a linen cloth.',
    'A stadium scoreboard that shows "{}" before a full crowd.',
    'A ceramic mug with "{}" printed on it, beside a window with rain.',
    'A protest placard with "{}" painted in red, held up in a crowd.',
    'The screen of a spaceship console with the message "{}" blinking in green.',
    'A museum label under a fossil that reads "{}".',
    'A luggage tag with "{}" handwritten on it, in an airport.',
)

OPENINGS = ("Open", "Daily", "Last", "First", "Golden", "Quiet", "Lost", "Secret", "Grand", "Old", "Wild", "Fresh")
MIDDLES = (
    "Harbor",
    "Garden",
    "Bakery",
    "Signal",
    "Lantern",
    "Winter",
    "River",
    "Market",
    "Engine",
    "Summit",
    "Compass",
)
ENDINGS = ("Ahead", "Today", "Only", "Inside", "24", "2049", "Station", "House", "Club", "Exit", "Zone", "Tour", "Lab")


class SignsTask:
    """Scenes with one, two or three words to write.

    Args:
        heldout: a prompt file whose lines hold the text in double quotes; none of its texts is trained on.
        train_size: prompts to train on, all different.
    """

    name = "ocr"

    def __init__(self, *, heldout: str | Path, train_size: int = 10_000) -> None:
        texts = len(OPENINGS) * (1 + len(MIDDLES) * (1 + len(ENDINGS)))
        if not 1 <= train_size <= len(SCENES) * texts // 2:
            raise ValueError(f"train_size must be in 1..{len(SCENES) * texts // 2}, got {train_size}")
        self._heldout = Path(heldout)
        self._train_size = train_size

    @cached_property
    def heldout_prompts(self) -> Sequence[Prompt]:
        return read_prompts(self._heldout)

    @cached_property
    def train_prompts(self) -> Sequence[Prompt]:
        rng = np.random.default_rng(PROMPT_SEED)
        forbidden = {prompt.metadata.get("target") for prompt in self.heldout_prompts}
        seen: set[str] = set()
        prompts: list[Prompt] = []
        while len(prompts) < self._train_size:
            parts = [words[rng.integers(len(words))] for words in (OPENINGS, MIDDLES, ENDINGS)]
            target = " ".join(parts[: rng.integers(1, 4)])
            text = SCENES[rng.integers(len(SCENES))].format(target)
            if text not in seen and target not in forbidden:
                seen.add(text)
                prompts.append(Prompt(id=len(prompts), text=text, metadata={"target": target}))
        return tuple(prompts)
