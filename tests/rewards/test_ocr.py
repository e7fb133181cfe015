import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.core.types import Prompt
from src.rl.rewards.ocr import levenshtein, ocr_score, target_text
from src.rl.rewards.reward import ScoreError

words = st.text("ABC", max_size=6)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("", "", 0), ("", "AB", 2), ("kitten", "sitting", 3), ("AB", "BA", 2), ("flaw", "lawn", 2)],
)
def test_edit_distance(a: str, b: str, distance: int) -> None:
    assert levenshtein(a, b) == distance


@given(words, words, words)
def test_edit_distance_is_a_metric(a: str, b: str, c: str) -> None:
    assert levenshtein(a, b) == levenshtein(b, a)
    assert (levenshtein(a, b) == 0) == (a == b)
    assert levenshtein(a, c) <= levenshtein(a, b) + levenshtein(b, c)


@pytest.mark.parametrize(
    ("read", "target", "score"),
    [
        ("AB12", "AB12", 1.0),
        ("ab 12", "A B12", 1.0),  # spaces and case are ignored
        ("XXAB12YY", "AB12", 1.0),  # the target stands in what was read
        ("AB1", "AB12", 0.75),
        ("AX1Y", "AB12", 0.5),
        ("", "AB12", 0.0),
        ("CDEFGHIJK", "AB12", 0.0),  # the distance is capped, so the score never falls below 0
    ],
)
def test_score(read: str, target: str, score: float) -> None:
    assert ocr_score(read, target) == score


def test_a_missing_target_is_a_failure_and_no_zero() -> None:
    with pytest.raises(ScoreError, match="empty"):
        ocr_score("AB", " ")
    with pytest.raises(ScoreError, match="prompt 7"):
        target_text(Prompt(id=7, text="AB12"))
