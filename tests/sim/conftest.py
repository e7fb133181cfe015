from __future__ import annotations

import pytest

from tests.sim.fakes import virtual_cluster


@pytest.fixture
def virtual(tmp_path):
    """Makes virtual clusters, by default in `tmp_path`."""
    made = []

    def make(folder=tmp_path, **shape):
        made.append(virtual_cluster(folder, **shape))
        return made[-1]

    yield make
    for cluster in made:
        cluster.coordinator.shutdown()
