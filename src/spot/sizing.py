"""How many requests a worker gets at once. Pure.

- An engine makes passes of `batch_size` rows and pads the last one, so a lease holds whole passes.
- It holds as many as the worker makes in `target_s`, at the speed that it showed: one where nothing is known, and
  never less than one. Few large leases save messages; but a worker deep in a long one cannot turn to something more
  urgent, and what it has made only counts at its end.
- It holds at most an equal share of what is queued, rounded up to whole passes, for each worker that may serve the
  kind (guided self-scheduling, Polychronopoulos and Kuck, 1987): so leases shrink towards the end of a phase, and the
  workers come to its end together.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Speed:
    """Seconds per pass and denoising step, as measured; each lease counts as much as all before it."""

    pass_step_s: float | None = None

    def measured(self, seconds: float, *, passes: int, steps: int) -> None:
        """A lease of so many passes over so many steps took so long, decoding and scoring included."""
        latest = seconds / (passes * max(1, steps))
        self.pass_step_s = latest if self.pass_step_s is None else (self.pass_step_s + latest) / 2


def lease_size(*, queued: int, steps: int, batch_size: int, workers: int, speed: Speed, target_s: float) -> int:
    """Requests of the next lease.

    Args:
        queued: requests that wait in this line (at least 1).
        steps: denoising steps that each of them needs.
        batch_size: rows of the worker's passes.
        workers: that may serve them, this one included.
        target_s: what a lease should take.
    """
    pass_s = None if speed.pass_step_s is None else speed.pass_step_s * max(1, steps)
    passes = 1 if pass_s is None else int(target_s / max(pass_s, 1e-9))
    share = passes_of(-(-queued // max(1, workers)), batch_size)
    return max(1, min(passes, share)) * batch_size


def passes_of(requests: int, batch_size: int) -> int:
    """Forward passes per step for so many requests."""
    return -(-requests // batch_size)
