from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from src.tasks.geneval import COLORS, KINDS, GenEvalTask
from src.tasks.prompt_sets import PromptSet, read_prompts
from src.tasks.signs import SignsTask

DATA = Path(__file__).parents[2] / "data" / "prompts"


def geneval(train_size: int = 1700) -> GenEvalTask:
    return GenEvalTask(
        heldout=DATA / "geneval_heldout.jsonl", classes=DATA / "geneval_classes.txt", train_size=train_size
    )


def test_text_files_hold_the_target_in_quotes(tmp_path: Path):
    file = tmp_path / "prompts.txt"
    file.write_text('A sign that says "Open late" and "more"\n\n a plain prompt \nhalf a "quote\n', encoding="utf-8")
    prompts = read_prompts(file)
    assert [prompt.id for prompt in prompts] == [0, 1, 2]
    assert prompts[0].metadata == {"target": "Open late"}
    assert (prompts[1].text, prompts[1].metadata) == ("a plain prompt", {})
    assert prompts[2].metadata == {}


def test_json_lines_keep_their_metadata(tmp_path: Path):
    row = {"tag": "colors", "include": [{"class": "cat", "count": 1, "color": "red"}], "prompt": "a photo of a red cat"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    (prompt,) = PromptSet(name="p", train=tmp_path / "p.jsonl", heldout=tmp_path / "p.jsonl").train_prompts
    assert (prompt.text, prompt.metadata) == (row["prompt"], row)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.csv", "a", r"must end with one of \['\.jsonl', '\.txt'\]"),
        ("p.txt", "\n", "is empty"),
        ("p.jsonl", '{"prompt": "a"}\nnonsense', r"p\.jsonl:2 is no JSON object with a prompt"),
        ("p.jsonl", '{"text": "a"}', r"p\.jsonl:1 is no JSON object with a prompt"),
        ("p.jsonl", '{"prompt": 3}', r"p\.jsonl:1: prompt must be a text, got 3"),
    ],
)
def test_bad_files_are_refused_by_name_and_line(tmp_path: Path, name: str, content: str, message: str):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / name)
    with pytest.raises(ValueError, match="there is no prompt file"):
        read_prompts(tmp_path / "missing.txt")


def test_geneval_s_suite_is_whole():
    heldout = geneval().heldout_prompts
    assert len(heldout) == 553
    tags = Counter(prompt.metadata["tag"] for prompt in heldout)
    assert tags == {
        "single_object": 80,
        "two_object": 99,
        "counting": 80,
        "colors": 94,
        "position": 100,
        "color_attr": 100,
    }


def test_our_geneval_prompts_follow_its_rules_and_none_is_held_out():
    """What a prompt says is what its metadata asks for: GenEval's suite reads in just the same way."""
    task = geneval()
    assert task.train_prompts == geneval().train_prompts
    texts = {prompt.text for prompt in task.train_prompts}
    assert len(texts) == 1700
    assert not texts & {prompt.text for prompt in task.heldout_prompts}
    share = Counter(prompt.metadata["tag"] for prompt in task.train_prompts)
    assert share["position"] > share["counting"] > share["colors"] > 0
    for prompt in (*task.train_prompts, *task.heldout_prompts):
        assert described(prompt.metadata) == prompt.text
    assert set(KINDS) | {"single_object"} == {prompt.metadata["tag"] for prompt in task.heldout_prompts}


def described(row) -> str:
    """The prompt of a line of metadata, written out anew."""

    def one(entry) -> str:
        words = [entry["color"]] if "color" in entry else []
        name = " ".join([*words, entry["class"]])
        return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"

    include = row["include"]
    if row["tag"] == "counting":
        (entry,) = include
        assert row["exclude"] == [{"class": entry["class"], "count": entry["count"] + 1}]
        number = {2: "two", 3: "three", 4: "four"}[entry["count"]]
        return f"a photo of {number} {entry['class']}{'es' if entry['class'].endswith('s') else 's'}"
    if row["tag"] == "position":
        relation, target = include[1]["position"]
        assert target == 0
        return f"a photo of {one(include[1])} {relation} {one(include[0])}"
    assert all(entry.get("color", "red") in COLORS for entry in include)
    return "a photo of " + " and ".join(map(one, include))


def test_signs_ask_for_their_target_and_none_is_held_out():
    task = SignsTask(heldout=DATA / "ocr_heldout.txt", train_size=500)
    assert len(task.heldout_prompts) == 1018
    assert all(prompt.metadata["target"] for prompt in task.heldout_prompts)
    assert len({prompt.text for prompt in task.train_prompts}) == 500
    assert all(f'"{prompt.metadata["target"]}"' in prompt.text for prompt in task.train_prompts)
    heldout = {prompt.metadata["target"] for prompt in task.heldout_prompts}
    assert not heldout & {prompt.metadata["target"] for prompt in task.train_prompts}
    with pytest.raises(ValueError, match="train_size must be in 1"):
        SignsTask(heldout=DATA / "ocr_heldout.txt", train_size=10**6)
