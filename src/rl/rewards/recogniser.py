"""Text recognisers that read pixels, and the reward made of them.

A recogniser never sees the prompt. The reward reads with `ConvRecogniser`; the judge that watches for reward
hacking is a `RecurrentRecogniser`, trained apart (other architecture, seed and distortions), so that what
fools one need not fool the other.

Images are uint8 BHWC; networks see float BCHW in [0, 1].
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from src.core.types import Prompt
from src.rl.rewards.ocr import ocr_score, target_text

BLANK = 0
"""The CTC class for `no symbol`; symbol i of the alphabet is class i + 1."""


class Recogniser(nn.Module):
    """A network that gives, for every column of the image, log-probabilities over blank and the alphabet.

    Subclasses define `forward`: pixels_BCHW in [0, 1] -> log-probabilities [B, columns, 1 + len(alphabet)].
    """

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = config
        self.alphabet: str = config["alphabet"]

    @torch.no_grad()
    def read(self, images_BHWC: NDArray[np.uint8]) -> list[str]:
        """The most likely string of each image: best class per column, repeats merged, blanks dropped."""
        classes = self(to_pixels(images_BHWC)).argmax(dim=-1).numpy()
        return [self._decode(row) for row in classes]

    def _decode(self, classes: NDArray[np.int64]) -> str:
        starts = np.flatnonzero(np.diff(classes, prepend=BLANK))
        return "".join(self.alphabet[c - 1] for c in classes[starts] if c != BLANK)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        weights = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        save_file(weights, folder / "model.safetensors")

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Load what `save_pretrained` wrote, ready to read."""
        folder = Path(folder)
        recogniser = cls(**json.loads((folder / "config.json").read_text()))
        recogniser.load_state_dict(load_file(folder / "model.safetensors"))
        return recogniser.eval()


def to_pixels(images_BHWC: NDArray[np.uint8]) -> Tensor:
    """uint8 BHWC -> float32 BCHW in [0, 1]."""
    return torch.from_numpy(images_BHWC).permute(0, 3, 1, 2).float() / 255.0


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class ConvRecogniser(Recogniser):
    """Four 3x3 convolutions and a linear readout per column: sees a few pixels around each column.

    Args:
        alphabet: the symbols it can read.
        height: image height in pixels, a multiple of 4.
        channels: width of the first two layers; the last two have twice as many.
    """

    def __init__(self, *, alphabet: str, height: int, channels: int) -> None:
        super().__init__(alphabet=alphabet, height=height, channels=channels)
        wide = 2 * channels
        self.features = nn.Sequential(
            _convolution(1, channels),
            _convolution(channels, channels),
            nn.MaxPool2d((2, 2)),
            _convolution(channels, wide),
            nn.MaxPool2d((2, 1)),
            _convolution(wide, wide),
        )
        self.readout = nn.Linear(wide * (height // 4), len(alphabet) + 1)

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        columns = self.features(pixels_BCHW).permute(0, 3, 1, 2).flatten(2)
        return torch.log_softmax(self.readout(columns), dim=-1)


class RecurrentRecogniser(Recogniser):
    """A strided convolution per column and a bidirectional GRU over the columns: sees the whole line.

    Args:
        alphabet: the symbols it can read.
        height: image height in pixels.
        channels: features per column.
        hidden: state size of the GRU in each direction.
    """

    def __init__(self, *, alphabet: str, height: int, channels: int, hidden: int) -> None:
        super().__init__(alphabet=alphabet, height=height, channels=channels, hidden=hidden)
        self.strokes = nn.Conv2d(1, channels // 2, (5, 5), padding=2)
        self.columns = nn.Conv2d(channels // 2, channels, (height, 3), stride=(1, 2), padding=(0, 1))
        self.line = nn.GRU(channels, hidden, batch_first=True, bidirectional=True)
        self.readout = nn.Linear(2 * hidden, len(alphabet) + 1)

    def forward(self, pixels_BCHW: Tensor) -> Tensor:
        strokes = nn.functional.gelu(self.strokes(pixels_BCHW))
        columns = nn.functional.gelu(self.columns(strokes)).squeeze(2).transpose(1, 2)
        states, _ = self.line(columns)
        return torch.log_softmax(self.readout(states), dim=-1)


class RecogniserReward:
    """The OCR reward with a recogniser as the reader.

    Args:
        name: the score's name in logs, such as "ocr" or "judge".
        recogniser: the trained reader.
    """

    def __init__(self, *, name: str, recogniser: Recogniser) -> None:
        self.name = name
        self.recogniser = recogniser.eval()

    def score(self, images_BHWC: NDArray[np.uint8], prompts: Sequence[Prompt]) -> NDArray[np.float32]:
        targets = [target_text(prompt) for prompt in prompts]
        reads = self.recogniser.read(images_BHWC)
        scores = [ocr_score(read, target) for read, target in zip(reads, targets, strict=True)]
        return np.array(scores, np.float32)
