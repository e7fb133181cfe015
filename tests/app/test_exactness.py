"""What does not change the result: workers and timing, to the last bit; the shape of batches, up to rounding."""

from __future__ import annotations

import pytest

from src.core import seeds
from src.core.events import read_explored_rows
from src.rl.seed_bank import SeedBank
from tests.app.runs import Run, assert_same_run, assert_same_tensors


@pytest.mark.parametrize("workers", [2, 3])
def test_the_number_of_workers_changes_nothing(inline, plain: Run, workers):
    run = inline("trainer.max_steps=4", workers=workers)
    assert_same_run(run, plain)
    spot = {event["worker"] for event in run.events("lease_done")} - {"reserved-local-0.0"}
    assert len(spot) == workers


ROUNDING = 1e-3
"""By how much rewards may differ between fingerprints that differ in the shape of a batch only: other kernels round the
latents differently, and a few pixels then fall on the other side of a rounding to eight bits."""


@pytest.mark.parametrize("batch_size", [1, 3, 5, 32])
def test_the_size_of_a_batch_changes_samples_by_no_more_than_rounding(inline, plain: Run, batch_size):
    """Compared before the first update: afterwards a selection that turns on the last bit may lead elsewhere."""
    run = inline("trainer.max_steps=2", f"model.batch_size={batch_size}")
    assert fingerprint(run) != fingerprint(plain)
    mine, theirs = (first_rewards(found) for found in (run, plain))
    assert mine.keys() == theirs.keys()
    assert mine == pytest.approx(theirs, abs=ROUNDING)
    for name in ("eval/reward", "train/reward"):
        assert run.metric(name)[0] == pytest.approx(plain.metric(name)[0], abs=ROUNDING)
    assert run.metric("train/grad_norm")[0] == pytest.approx(plain.metric("train/grad_norm")[0], rel=ROUNDING)


def fingerprint(run: Run) -> str:
    """The one of all its processes."""
    (found,) = {event["fingerprint"] for event in run.events("worker_joined")}
    return str(found)


def first_rewards(run: Run) -> dict[tuple[int, int], float]:
    """By (instance, seed), of what was explored before the first update."""
    rows = run.events("explored")[0]["results"]
    return {(row["instance"], row["seed"]): row["reward"] for row in rows}


def test_replay_repeats_a_run_without_workers(inline, plain: Run):
    run = inline("trainer.max_steps=4", "explore.sync=replay", f"explore.replay_from={plain.folder}", workers=0)
    assert_same_tensors(run.policy, plain.policy)
    assert run.metric("train/reward") == plain.metric("train/reward")
    assert run.metric("eval/reward") == plain.metric("eval/reward")
    assert {event["worker"] for event in run.events("lease_done")} == {"reserved-local-0.0"}


def test_exploration_decides_what_is_trained_on(inline, plain: Run):
    """The counterpart of replay: other rewards in the event log lead elsewhere."""
    altered = plain.folder.parent / "altered"
    altered.mkdir()
    log = (plain.folder / "events.jsonl").read_text()
    first = plain.events("explored")[0]["results"]
    swapped = log.replace(f'"reward":{first[0]["reward"]}', '"reward":0.5')
    assert swapped != log
    (altered / "events.jsonl").write_text(swapped)
    run = inline("trainer.max_steps=4", "explore.sync=replay", f"explore.replay_from={altered}", workers=0)
    assert [event["seeds"] for event in run.events("kept")] != [event["seeds"] for event in plain.events("kept")]


def test_kept_seeds_are_the_bank_s_choice_among_explored_ones(plain: Run):
    """From the event log alone: every explored seed is a candidate, and the extremes were kept."""
    explored = {event["iteration"]: event for event in plain.events("explored")}
    kept = {event["iteration"]: event["seeds"] for event in plain.events("kept")}
    assert sorted(explored) == [1, 2, 3]
    assert sorted(kept) == [0, 1, 2, 3]
    for iteration, event in explored.items():
        assert event["version"] == f"0.{iteration - 1}"
        found = read_explored_rows(event["results"])
        for instance, results in found.items():
            assert {result.seed for result in results} == set(seeds.sample_seeds(0, iteration, instance, 8))
            chosen = kept[iteration][str(instance)]
            assert len(set(chosen)) == 4
            rewards = {result.seed: result.reward for result in results}
            assert {min(rewards.values()), max(rewards.values())} <= {rewards[seed] for seed in chosen}


def test_without_exploration_it_is_plain_flow_grpo(inline):
    run = inline("planner=none", "trainer.max_steps=3")
    for event in run.events("kept"):
        expected = {
            str(instance): list(seeds.sample_seeds(0, event["iteration"], instance, 4)) for instance in range(3)
        }
        assert event["seeds"] == expected
    assert run.metric("train/reward")
    assert not [event for event in run.events("lease_granted") if event["request_kind"] == "explore"]
    assert run.metric("explore/explored") == [0, 0]  # for the two batches that have one before them
    assert run.metric("explore/spearman") == []


def test_without_workers_it_is_plain_flow_grpo_too(inline):
    alone = inline("trainer.max_steps=3", "explore.sync=race", workers=0)
    plain_grpo = inline("planner=none", "trainer.max_steps=3")
    assert_same_tensors(alone.policy, plain_grpo.policy)


def test_the_run_seed_decides_the_run(inline):
    one, other = inline(), inline("seed=1")
    assert one.metric("train/reward") != other.metric("train/reward")
    assert one.metric("eval/reward")[0] == other.metric("eval/reward")[0]  # held-out seeds are fixed


def test_the_bank_of_a_checkpoint_knows_the_next_seeds(plain: Run, inline):
    run = inline("trainer.max_steps=4", stop_after=2)
    bank = SeedBank(run_seed=0, select=lambda rewards, count, ties: list(range(count)))
    bank.load_state_dict(run.checkpoint.state["seed_bank"])
    (event,) = [event for event in plain.events("explored") if event["iteration"] == 2]
    found = {i: tuple(sorted(r, key=lambda e: e.seed)) for i, r in read_explored_rows(event["results"]).items()}
    assert {instance: bank.explored(2, instance) for instance in range(3)} == found
