from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow
import pytest
from pyarrow import ipc, parquet

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
        ("p.csv", "a", r"must be one of \.txt, \.jsonl, \.parquet, a folder of Dataset\.save_to_disk, got"),
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


GENEVAL = [
    {"tag": "colors", "include": [{"class": "cat", "count": 1, "color": "red"}], "prompt": "a photo of a red cat"},
    {"tag": "counting", "include": [{"class": "dog", "count": 3}], "prompt": "a photo of three dogs"},
]
SIGNS = [
    {"prompt": 'A sign says "Open"', "target": None},
    {"prompt": 'A "big" sign', "target": "OPEN"},
    {"prompt": "a cat", "target": None},
]


def save_parquet(rows: Sequence[dict], file: Path) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file


def save_dataset(shards: Sequence[Sequence[dict]], folder: Path) -> Path:
    """The files of `datasets.Dataset.save_to_disk` (datasets 5) that say what is where."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, rows in zip(names, shards, strict=True):
        table = pyarrow.Table.from_pylist(rows)
        with ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_tables_hold_what_json_lines_hold(tmp_path: Path) -> None:
    """Objects of one column have unlike keys in GenEval: Arrow fills the missing ones with null."""
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, GENEVAL)))
    expected = read_prompts(tmp_path / "p.jsonl")
    assert [prompt.metadata for prompt in expected] == GENEVAL
    assert read_prompts(save_parquet(GENEVAL, tmp_path / "p.parquet")) == expected
    assert read_prompts(save_dataset([GENEVAL[:1], GENEVAL[1:]], tmp_path / "saved" / "train")) == expected


def test_the_text_to_render_is_the_target_column_or_what_is_quoted(tmp_path: Path) -> None:
    for file in (save_parquet(SIGNS, tmp_path / "p.parquet"), save_dataset([SIGNS], tmp_path / "saved")):
        assert [prompt.metadata.get("target") for prompt in read_prompts(file)] == ["Open", "OPEN", None]


def test_shards_are_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number, row in enumerate(SIGNS):
        save_parquet([row], tmp_path / f"train-{number:05d}-of-00003.parquet")
    save_parquet(GENEVAL, tmp_path / "test-00000-of-00001.parquet")
    prompts = read_prompts(tmp_path / "train-*.parquet")
    assert [(prompt.id, prompt.text) for prompt in prompts] == [(i, row["prompt"]) for i, row in enumerate(SIGNS)]
    with pytest.raises(ValueError, match=r"there is no prompt file .*valid-\*\.parquet"):
        read_prompts(tmp_path / "valid-*.parquet")


def test_bad_tables_are_refused_by_name_and_row(tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing of the kind")
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "empty").mkdir()
    lost = save_dataset([SIGNS], tmp_path / "lost")
    (lost / "data-00000-of-00001.arrow").unlink()
    cases = {
        save_parquet(
            [{"text": "a", "id": 1}], tmp_path / "column.parquet"
        ): "column.parquet has no column prompt, only",
        save_parquet(
            [*SIGNS, {"prompt": None}], tmp_path / "row.parquet"
        ): "row.parquet:4: prompt must be a text, got None",
        save_parquet(
            [{"prompt": [{"role": "user"}]}], tmp_path / "chat.parquet"
        ): "chat.parquet:1: prompt must be a text",
        tmp_path / "broken.parquet": "broken.parquet cannot be read",
        tmp_path / "splits": "holds the splits train, test: give one of them, such as .*/splits/train",
        tmp_path / "empty": "empty is no folder of Dataset.save_to_disk: it has no state.json",
        lost: "data-00000-of-00001.arrow cannot be read",
    }
    for path, message in cases.items():
        with pytest.raises(ValueError, match=message):
            read_prompts(path)


def test_a_split_depends_on_texts_alone(tmp_path: Path) -> None:
    texts = [f"prompt {number}" for number in range(20)]
    (tmp_path / "all.txt").write_text("\n".join([*texts, texts[3]]))
    (tmp_path / "turned.txt").write_text("\n".join(reversed(texts)))
    whole = PromptSet(name="p", train=tmp_path / "all.txt", split=5)
    train, heldout = ({prompt.text for prompt in part} for part in (whole.train_prompts, whole.heldout_prompts))
    assert len(heldout) == 5
    assert train == set(texts) - heldout
    assert len(whole.train_prompts) + len(whole.heldout_prompts) == 21
    assert [prompt.id for prompt in whole.train_prompts] == list(range(len(whole.train_prompts)))
    turned = PromptSet(name="p", train=tmp_path / "turned.txt", split=5)
    assert {prompt.text for prompt in turned.heldout_prompts} == heldout
    assert heldout < {
        prompt.text for prompt in PromptSet(name="p", train=tmp_path / "all.txt", split=6).heldout_prompts
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either heldout or split must be given, got heldout=None and split=None"),
        ({"heldout": "a.txt", "split": 2}, "either heldout or split must be given"),
        ({"split": 0}, "split must be at least 1, got 0"),
        ({"split": 2}, "split must be less than the 2 texts of .*, got 2"),
    ],
)
def test_bad_splits_are_refused(tmp_path: Path, arguments: dict, message: str) -> None:
    (tmp_path / "p.txt").write_text("a\nb\na\n")
    with pytest.raises(ValueError, match=message):
        _ = PromptSet(name="p", train=tmp_path / "p.txt", **arguments).train_prompts


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
