from pathlib import Path

import pytest

from src.report.read import curves, flatten, read_run
from tests.report.synthetic import write_run


def test_a_finished_run_is_read_whole(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "day" / "hour", iterations=8))
    assert run.name == "day/hour"
    assert run.status == "done"
    assert [step for step, _ in run.curves["eval/reward"]] == [0, 4, 8]
    assert len(run.curves["train/reward"]) == 8
    assert len(run.pictures) == 16
    assert (run.pictures[0].iteration, run.pictures[0].judge) == (0, None)
    assert run.summary["steps"] == 8
    assert run.wall_s == run.events[-1]["time_s"]


def test_a_run_that_was_killed_while_it_wrote_is_read_up_to_there(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", iterations=4, finished=False, images=False)
    with (folder / "events.jsonl").open("a") as events:
        events.write('{"time_s": 99, "ki')
    whole = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(whole[:-5])
    run = read_run(folder)
    assert run.status == "unfinished"
    assert run.summary == {}
    assert run.pictures == ()
    assert [step for step, _ in run.curves["eval/reward"]] == [0]


def test_a_restarted_run_is_unfinished_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", iterations=1, images=False)
    with (folder / "events.jsonl").open("a") as events:
        events.write('{"time_s": 99, "kind": "run_started", "incarnation": 1, "iteration": 1}\n')
    assert read_run(folder).status == "unfinished"


def test_only_the_event_log_is_needed(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("")
    run = read_run(tmp_path)
    assert (run.events, run.curves, run.config, run.wall_s) == ((), {}, "", 0.0)


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path} is no run folder: it has no events.jsonl"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("events.jsonl", "{}\nnonsense\n{}\n", "events.jsonl:2"),
        ("metrics.jsonl", '{"step": 0}\n{"step": \n{}\n', "metrics.jsonl:2"),
        (
            "events.jsonl",
            '{"time_s": 1, "kind": "closed"}\n{"kind": "closed"}\n',
            "events.jsonl:2: an event has time_s",
        ),
        ("config.yaml", "a: b: c", "config.yaml: mapping values are not allowed here"),
        ("config.yaml", "- a", "config.yaml: a configuration maps names to values"),
        ("summary.json", "{\n!", "summary.json:2"),
        ("images/manifest.json", '[{"iteration": 0}]', r"manifest.json: unexpected row: KeyError\('index'\)"),
    ],
)
def test_damage_is_named_by_file_and_line(tmp_path: Path, file: str, content: str, message: str) -> None:
    folder = write_run(tmp_path / "run", iterations=1)
    (folder / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_run(folder)


def test_a_picture_outside_the_run_folder_is_not_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", iterations=1)
    row = '{"iteration": 0, "index": 0, "prompt": "", "reward": 0, "judge": null, "file": "../../secret.png"}'
    (folder / "images" / "manifest.json").write_text(f"[{row}]")
    assert read_run(folder).pictures[0].path == folder / "images" / "secret.png"


def test_curves_keep_the_last_value_of_a_step_and_leave_out_what_is_not_finite() -> None:
    rows = [
        {"step": 2, "time_s": 1.0, "a": 1, "b": float("nan")},
        {"step": 1, "time_s": 2.0, "a": 5.0, "b": float("inf")},
        {"step": 2, "time_s": 3.0, "a": 7.0, "c": None},
    ]
    assert curves(rows) == {"a": ((1.0, 5.0), (2.0, 7.0))}


def test_config_scalars_are_named_by_their_path() -> None:
    config = "seed: 1\nmodel:\n  lora:\n    rank: 16\n  name: 'a: b'\n"
    config += "  source: two\n    lines, a:b\nlist:\n- 1\n- a\nlast: null\n"
    expected = {"seed": "1", "model.lora.rank": "16", "model.name": "a: b", "list": '[1, "a"]', "last": "null"}
    expected |= {"model.source": "two lines, a:b"}
    assert flatten(config) == expected
