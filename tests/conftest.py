"""Settings of all tests."""

import os
from pathlib import Path

from hypothesis import settings

# One thread per process, set before torch is imported: the models are tiny, and many processes share the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["SPOTLIGHT_ROOT"] = str(Path(__file__).parents[1])  # as train.py sets it

# No deadline: tests share their machine. Derandomized: a commit passes or fails, it does not flicker.
settings.register_profile("spotlight", deadline=None, derandomize=True)
settings.load_profile("spotlight")
