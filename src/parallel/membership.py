"""Who belongs to an elastic group: a pure decider that turns what members report into generations.

It is told the time with each event (`at_s`) and keeps no clock. Three ways lead to the next generation:

    error      Members whose collective failed drop the group and report. The first report opens a window; who has
               not reported when it closes is out: dead, or as good as dead. It may join again.
    boundary   A notice or a join waits for the end of the step in hand. Rank 0 asks between two steps (`boundary`) and
               tells the others over the group, so that all leave it after the same step.
    silence    A member without heartbeats is frozen: it counts as dead, and the others' collectives will time out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Generation:
    """One membership: `members` in the order of their ranks. Numbers rise and are never used twice."""

    number: int
    members: tuple[str, ...]


class Membership:
    """The state machine.

    Args:
        members: of generation 0, in the order of their ranks.
        window_s: how long after the first report of an error the others' reports are waited for.
        heartbeat_timeout_s: a member that was silent for longer is frozen.
    """

    def __init__(self, members: Sequence[str], *, window_s: float = 0.05, heartbeat_timeout_s: float = 10.0) -> None:
        for name, value in (("window_s", window_s), ("heartbeat_timeout_s", heartbeat_timeout_s)):
            if value <= 0:
                raise ValueError(f"Membership.{name} must be positive, got {value}")
        if len(set(members)) != len(members):
            raise ValueError(f"Membership.members must differ, got {list(members)}")
        self.current = Generation(0, tuple(members))
        self._window_s = window_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._heard_s: dict[str, float] = {}
        self._reported: set[str] = set()
        self._going: set[str] = set()
        self._coming: list[str] = []
        self._broken_s: float | None = None

    # ---------------------------------------------------------------- events

    def heartbeat(self, at_s: float, member: str) -> None:
        """The member is alive."""
        self._heard_s[member] = at_s

    def broken(self, at_s: float, member: str, generation: int) -> None:
        """A collective of this generation failed; the member has dropped the group and waits for the next one.

        Late news of an earlier generation changes nothing, nor does that of a member which is out.
        """
        self.heartbeat(at_s, member)
        if generation == self.current.number and member in self.current.members:
            self._reported.add(member)
            self._break(at_s)

    def notice(self, at_s: float, member: str) -> None:
        """The member will be taken away: it stays until the next boundary, and is not in the next generation."""
        self.heartbeat(at_s, member)
        self._coming = [other for other in self._coming if other != member]
        if member in self.current.members:
            self._going.add(member)

    def dead(self, at_s: float, member: str) -> None:
        """The member's process has ended: the others need not wait for its report."""
        self._heard_s.pop(member, None)
        self._coming = [other for other in self._coming if other != member]
        if member in self.current.members:
            self._going.add(member)
            self._break(at_s)

    def join(self, at_s: float, member: str) -> None:
        """The member is warm and wants in. If it is listed, its earlier life ended unseen."""
        if member in self.current.members and member not in self._going:
            self.dead(at_s, member)
        self.heartbeat(at_s, member)
        if member not in self._coming:
            self._coming.append(member)

    def boundary(self, at_s: float, generation: int) -> bool:
        """Rank 0 of the generation stands between two steps. True: all its members drop the group and wait."""
        if generation != self.current.number:
            return True
        if not (self._going or self._coming or self._broken_s is not None):
            return False
        self._reported |= set(self.current.members) - self._going
        self._break(at_s)
        return True

    # ---------------------------------------------------------------- decision

    def advance(self, at_s: float) -> Generation | None:
        """The next generation, if its time has come. Those who stay keep their order; who joins comes last."""
        for member in self.current.members:
            if at_s - self._heard_s.get(member, at_s) > self._heartbeat_timeout_s:
                self.dead(at_s, member)
        if self._coming and not self.current.members:
            self._break(at_s)  # nobody is there who could reach a boundary
        if self._broken_s is None:
            return None
        staying = [member for member in self.current.members if member not in self._going]
        if not self._reported.issuperset(staying) and at_s < self._broken_s + self._window_s:
            return None
        survivors = [member for member in staying if member in self._reported]
        self.current = Generation(self.current.number + 1, (*survivors, *self._coming))
        self._reported, self._going, self._coming, self._broken_s = set(), set(), [], None
        return self.current

    def _break(self, at_s: float) -> None:
        if self._broken_s is None:
            self._broken_s = at_s
