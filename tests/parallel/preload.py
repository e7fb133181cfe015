"""What ranks of `elastic_ranks` need, imported by the process that they are forked from."""

import torch

import tests.parallel.test_elastic  # noqa: F401
from src.parallel.engine import prepare_deepspeed

torch.set_num_threads(1)
prepare_deepspeed(torch.device("cpu"))
