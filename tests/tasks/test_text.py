import hashlib

import numpy as np
import pytest

from src.tasks.text import SYMBOLS, TextTask, Typeface, digits_task

TASKS = {"text": TextTask(), "digits": digits_task()}


@pytest.fixture(params=TASKS)
def task(request: pytest.FixtureRequest) -> TextTask:
    return TASKS[request.param]


def renders(task: TextTask, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([task.render(task.sample_prompt(rng), rng) for _ in range(count)])


def test_images_are_uint8_with_ink_on_black(task: TextTask) -> None:
    images = renders(task, 200, seed=0)
    assert images.dtype == np.uint8
    assert images.shape[1:] == task.image_size
    assert (images.max(axis=(1, 2, 3)) > 200).all()
    assert (np.median(images, axis=(1, 2, 3)) == 0).all()


@pytest.mark.parametrize(
    ("name", "digest"),
    [("text", "60488d959cc10ce5"), ("digits", "ab0708329506486f")],
)
def test_renders_are_pinned(name: str, digest: str) -> None:
    """The shipped weights were trained on exactly these pixels (fonts of matplotlib, FreeType of Pillow)."""
    assert hashlib.sha256(renders(TASKS[name], 500, seed=1).tobytes()).hexdigest()[:16] == digest


def test_prompt_sets_are_disjoint_and_fixed(task: TextTask) -> None:
    train = {prompt.text for prompt in task.train_prompts}
    heldout = {prompt.text for prompt in task.heldout_prompts}
    assert len(train) == len(task.train_prompts)
    assert len(heldout) == len(task.heldout_prompts)
    assert not train & heldout
    assert [prompt.id for prompt in task.heldout_prompts] == list(range(len(heldout)))
    again = {"text": TextTask, "digits": digits_task}[task.name]()
    assert again.train_prompts == task.train_prompts
    assert again.heldout_prompts == task.heldout_prompts


def test_sampled_prompts_are_never_held_out() -> None:
    task = TASKS["digits"]
    rng = np.random.default_rng(0)
    sampled = {task.sample_prompt(rng).text for _ in range(20_000)}
    assert sampled == {prompt.text for prompt in task.train_prompts}


def test_prompts_use_the_alphabet_and_name_their_target(task: TextTask) -> None:
    for prompt in (*task.train_prompts, *task.heldout_prompts):
        assert len(prompt.text) == task.max_tokens
        assert set(prompt.text) <= set(task.vocabulary)
        assert prompt.metadata["target"] == prompt.text


def test_text_is_drawn_at_many_places_in_every_typeface() -> None:
    task = TextTask(alphabet="X", length=1, train_size=1, heldout_size=0)
    prompt = task.train_prompts[0]
    rng = np.random.default_rng(0)
    images = [task.render(prompt, rng) for _ in range(500)]
    boxes = {tuple(int(np.flatnonzero(image.max(axis=(1 - axis, 2)))[0]) for axis in (0, 1)) for image in images}
    assert len(boxes) > 150
    assert len({int(image.sum()) for image in images}) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alphabet": "AB", "length": 2, "train_size": 4, "heldout_size": 1}, "at most 4"),
        ({"height": 6}, "height must be at least"),
    ],
)
def test_impossible_tasks_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextTask(**arguments)


def test_symbols_are_distinct() -> None:
    assert len(set(SYMBOLS)) == len(SYMBOLS) == 32
    task = TextTask(typefaces=[Typeface("DejaVuSansMono.ttf", 12)], train_size=1, heldout_size=0)
    glyphs = [glyph.tobytes() for glyph in task._fonts[0].values()]
    assert len(set(glyphs)) == 32
