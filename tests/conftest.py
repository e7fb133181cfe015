"""Settings of all tests."""

from hypothesis import settings

# No deadline: tests share their machine. Derandomized: a commit passes or fails, it does not flicker.
settings.register_profile("spotlight", deadline=None, derandomize=True)
settings.load_profile("spotlight")
