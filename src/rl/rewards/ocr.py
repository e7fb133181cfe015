"""The OCR reward rule: how close the text that was read is to the text that was asked for."""

from src.core.types import Prompt
from src.rl.rewards.reward import ScoreError


def levenshtein(a: str, b: str) -> int:
    """Fewest insertions, deletions and substitutions that turn `a` into `b`."""
    row = list(range(len(b) + 1))
    for i, symbol_a in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, symbol_b in enumerate(b, start=1):
            substituted = diagonal + (symbol_a != symbol_b)
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, substituted)
    return row[-1]


def ocr_score(read: str, target: str) -> float:
    """1 - d / len(target), in [0, 1].

    Spaces and case are ignored. d is 0 if the target stands anywhere in what was read, else the edit
    distance, at most len(target). This is the rule of Flow-GRPO's OCR reward.

    Raises:
        ScoreError: the target is empty.
    """
    read, target = (text.replace(" ", "").lower() for text in (read, target))
    if not target:
        raise ScoreError("the target text is empty")
    distance = 0 if target in read else min(levenshtein(read, target), len(target))
    return 1.0 - distance / len(target)


def target_text(prompt: Prompt) -> str:
    """The text that an image of `prompt` has to show (never the whole prompt).

    Raises:
        ScoreError: the prompt names none.
    """
    target = prompt.metadata.get("target")
    if not isinstance(target, str):
        raise ScoreError(f"prompt {prompt.id} has no target text in its metadata")
    return target
