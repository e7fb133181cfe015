import hashlib

import numpy as np
import pytest

from src.tasks.shapes import PALETTE, PROMPTS, QUARTERS_OF_RELATION, SHAPES, ShapesTask, shape_mask

TASK = ShapesTask()


def test_renders_are_pinned() -> None:
    rng = np.random.default_rng(1)
    images = np.stack([TASK.render(TASK.sample_prompt(rng), rng) for _ in range(500)])
    assert images.dtype == np.uint8
    assert images.shape[1:] == TASK.image_size
    assert hashlib.sha256(images.tobytes()).hexdigest()[:16] == "4704130f6f60bed4"


def test_prompt_sets_are_disjoint_and_cover_every_tag() -> None:
    train = {prompt.text for prompt in TASK.train_prompts}
    heldout = {prompt.text for prompt in TASK.heldout_prompts}
    assert not train & heldout
    assert len(train) + len(heldout) == len(TASK.train_prompts) + len(TASK.heldout_prompts)
    for prompts in (TASK.train_prompts, TASK.heldout_prompts):
        assert {prompt.metadata["tag"] for prompt in prompts} == set(PROMPTS)


def test_sampled_prompts_balance_the_tags_and_are_never_held_out() -> None:
    rng = np.random.default_rng(0)
    sampled = [TASK.sample_prompt(rng) for _ in range(2000)]
    assert {prompt.text for prompt in sampled}.isdisjoint(prompt.text for prompt in TASK.heldout_prompts)
    counts = [sum(prompt.metadata["tag"] == tag for prompt in sampled) for tag in PROMPTS]
    assert min(counts) > 400


def test_metadata_follows_genevals_schema() -> None:
    for prompt in (*TASK.train_prompts, *TASK.heldout_prompts):
        row = prompt.metadata
        assert row["prompt"] == prompt.text
        assert set(row) <= {"tag", "include", "exclude", "prompt"}
        for entry in row["include"]:
            assert entry["class"] in SHAPES
            assert entry["color"] in PALETTE
            assert 1 <= entry["count"] <= 4
            if "position" in entry:
                relation, target = entry["position"]
                assert relation in QUARTERS_OF_RELATION
                assert target == 0


def test_a_position_prompt_names_the_related_object_first() -> None:
    row = next(row for row in PROMPTS["position"]() if row["prompt"] == "a red circle left of a blue square")
    assert row["include"] == [
        {"class": "square", "count": 1, "color": "blue"},
        {"class": "circle", "count": 1, "color": "red", "position": ["left of", 0]},
    ]


@pytest.mark.parametrize(
    ("shape", "pixels"),
    [("square", ["#####"] * 5), ("circle", [".###.", "#####", "#####", "#####", ".###."])],
)
def test_masks(shape: str, pixels: list[str]) -> None:
    drawn = ["".join(".#"[int(bit)] for bit in row) for row in shape_mask(shape, 5, 5)]
    assert drawn == pixels


def test_impossible_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="size must be even"):
        ShapesTask(size=15)
    with pytest.raises(ValueError, match="tags must be"):
        ShapesTask(tags=["colours"])
    with pytest.raises(ValueError, match="shape must be"):
        shape_mask("star", 5, 5)
