import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from src.core.types import Blob, PolicyVersion, RequestKey, RequestKind, SampleResult, Trajectory
from src.rl.advantages import GroupAdvantage, batch_std, group_std
from src.rl.rollouts import Rollouts

reward_groups = st.lists(
    st.lists(st.integers(0, 16).map(lambda n: n / 16), min_size=1, max_size=8), min_size=1, max_size=5
)


def test_a_group_is_normalised_by_its_own_mean_and_standard_deviation():
    found = GroupAdvantage()([[0.0, 1.0], [0.2, 0.4, 0.9]])
    np.testing.assert_allclose(found.groups[0], [-0.5 / 0.5001, 0.5 / 0.5001], rtol=1e-14)
    std = np.sqrt((0.3**2 + 0.1**2 + 0.4**2) / 3)
    np.testing.assert_allclose(found.groups[1], np.array([-0.3, -0.1, 0.4]) / (std + 1e-4), rtol=1e-12)
    assert found.zero_variance == 0


def test_the_batch_has_one_standard_deviation_but_every_group_its_own_mean():
    """All rewards are 0.5 -+ 0.5 and 0.5 -+ 0.1: their variance is 0.13."""
    found = GroupAdvantage(spread=batch_std)([[0.0, 1.0], [0.4, 0.6]])
    scale = np.sqrt(0.13) + 1e-4
    np.testing.assert_allclose(found.groups[0], [-0.5 / scale, 0.5 / scale], rtol=1e-12)
    np.testing.assert_allclose(found.groups[1], [-0.1 / scale, 0.1 / scale], rtol=1e-12)


def test_advantages_are_clamped():
    """One success in 100 is 9.9 standard deviations above the mean."""
    found = GroupAdvantage(clamp=5.0)([[0.0] * 99 + [1.0]])
    assert found.groups[0][-1] == 5.0
    assert GroupAdvantage(clamp=20.0)([[0.0] * 99 + [1.0]]).groups[0][-1] == pytest.approx(9.94, abs=0.01)


@pytest.mark.parametrize("spread", [group_std, batch_std])
def test_groups_without_contrast_get_exactly_zero_and_are_counted(spread):
    """The standard deviation of three 0.1 is not 0 in floating point: 0 must come from the values."""
    assert np.std([0.1, 0.1, 0.1]) > 0
    found = GroupAdvantage(spread=spread, eps=0.0)([[0.1, 0.1, 0.1], [0.0, 1.0], [0.7]])
    assert found.groups[0].tolist() == [0.0, 0.0, 0.0]
    assert found.groups[2].tolist() == [0.0]
    assert found.groups[1][0] < 0 < found.groups[1][1]
    assert found.zero_variance == 2


def test_before_selection_takes_mean_and_std_of_all_explored():
    """Explored 0, 1/4, ..., 1: mean 1/2, variance 1/8. The kept rewards have another mean."""
    explored = [0.0, 0.25, 0.5, 0.75, 1.0]
    found = GroupAdvantage(before_selection=True)([[0.0, 1.0, 1.0]], [explored])
    scale = np.sqrt(0.125) + 1e-4
    np.testing.assert_allclose(found.groups[0], [-0.5 / scale, 0.5 / scale, 0.5 / scale], rtol=1e-12)


def test_before_selection_uses_the_own_rewards_where_nothing_was_explored():
    kept = [[0.0, 1.0, 1.0], [0.25, 0.5]]
    before = GroupAdvantage(before_selection=True)(kept, [[], [0.0, 0.5, 1.0]])
    assert before.groups[0].tolist() == GroupAdvantage()(kept).groups[0].tolist()
    assert before.groups[1].tolist() != GroupAdvantage()(kept).groups[1].tolist()


def test_by_default_explored_rewards_change_nothing():
    kept = [[0.0, 1.0, 1.0]]
    assert GroupAdvantage()(kept, [[0.0, 0.1]]).groups[0].tolist() == GroupAdvantage()(kept).groups[0].tolist()


@pytest.mark.parametrize("explored", [None, [[0.1, 0.2]]])
def test_before_selection_needs_the_explored_rewards_of_every_group(explored):
    with pytest.raises(ValueError, match="explored rewards of each of the 2 groups"):
        GroupAdvantage(before_selection=True)([[0.0, 1.0], [0.0, 1.0]], explored)


@pytest.mark.parametrize("group", [[], [0.1, float("nan")], [0.1, float("inf")]])
def test_a_missing_reward_is_never_taken_for_a_number(group):
    with pytest.raises(ValueError, match="finite rewards"):
        GroupAdvantage()([[0.0, 1.0], group])


@pytest.mark.parametrize(("field", "value"), [("clamp", 0.0), ("eps", -1e-4), ("clamp", float("nan"))])
def test_settings_are_checked(field, value):
    with pytest.raises(ValueError, match=rf"GroupAdvantage\.{field} must .*, got {value}"):
        GroupAdvantage(**{field: value})


@given(reward_groups)
def test_advantages_centre_and_order_every_group(rewards):
    found = GroupAdvantage(clamp=1e9)(rewards)
    for group, advantages in zip(rewards, found.groups, strict=True):
        assert advantages.shape == (len(group),)
        assert np.argsort(advantages, kind="stable").tolist() == np.argsort(group, kind="stable").tolist()
        assert advantages.mean() == pytest.approx(0.0, abs=1e-9)


@given(reward_groups)
def test_a_group_does_not_depend_on_the_others(rewards):
    together = GroupAdvantage()(rewards)
    alone = [GroupAdvantage()([group]).groups[0].tolist() for group in rewards]
    assert [group.tolist() for group in together.groups] == alone


def test_failed_samples_move_no_baseline_and_equal_texts_are_not_merged():
    """Instances 0 and 1 could be the same prompt twice; the failed sample has reward NaN and is left out."""
    rollouts = Rollouts.stack(
        [
            result(0, 0, 0.0),
            result(0, 1, 1.0),
            result(0, 2, float("nan"), error="no score"),
            result(1, 3, 0.6),
        ]
    )
    rewards = [[rollouts.rewards_B[row] for row in rows] for rows in rollouts.groups().values()]
    assert rewards == [[0.0, 1.0], [0.6]]
    found = GroupAdvantage()(rewards)
    assert found.groups[0].tolist() == GroupAdvantage()([[0.0, 1.0]]).groups[0].tolist()
    assert (found.zero_variance, rollouts.failed) == (1, 1)


def result(instance: int, seed: int, reward: float, error: str | None = None) -> SampleResult:
    key = RequestKey("run", 0, RequestKind.ROLLOUT, instance, seed, PolicyVersion(0, 0), steps=2)
    latents = Blob("float32", (1, 1, 1), np.zeros(1, np.float32).tobytes())
    trajectory = Trajectory(latents, latents, Blob("float32", (1,), latents.buffer), fingerprint="test")
    return SampleResult(key, "worker", "checksum", reward, trajectory=None if error else trajectory, error=error)
