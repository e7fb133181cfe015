from collections.abc import Iterator

import pytest
import torch

from tests.parallel.ranks import RankPool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Three processes: degrees 2 and 3."""
    pool = RankPool(3)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def many_ranks() -> Iterator[RankPool]:
    """Six processes, for the slow suite."""
    pool = RankPool(6)
    yield pool
    pool.close()
