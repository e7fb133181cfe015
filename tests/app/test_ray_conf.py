"""The configuration of a job on a Ray cluster. Such jobs: test_ray_cluster.py."""

from __future__ import annotations

import re

import pytest

from src.app.config import ConfigError, spot_places
from tests.app.runs import EXPLORED, TINY, configuration

RAY_CLUSTER = ("cluster=ray", "cluster.address=10.0.0.1:6379")


def test_a_ray_cluster_has_a_section_of_its_own(tmp_path):
    cluster = configuration(tmp_path, *TINY, EXPLORED, *RAY_CLUSTER, "cluster.workers_per_node=3")
    assert spot_places(cluster) == 3


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("cluster.address=10.0.0.1", "cluster.address: string should match pattern"),
        ("cluster.connect_timeout_s=0.0", "cluster.connect_timeout_s: input should be greater than 0, got 0.0"),
        ("cluster.label=''", "cluster.label: string should have at least 1 character, got ''"),
        ("+cluster.spot_workers=2", "cluster.spot_workers: there is no such key"),
        ("market=replay", "market.decider must be null on a Ray cluster"),
    ],
)
def test_what_a_ray_cluster_cannot_have_is_refused(tmp_path, override, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        configuration(tmp_path, *TINY, EXPLORED, *RAY_CLUSTER, override)
