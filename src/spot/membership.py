"""Who belongs to an elastic group: a pure decider that turns what members report into generations.

It is told the time with each event (`at_s`) and keeps no clock. Three ways lead to the next generation:

    error      Members whose collective failed drop the group and report. The first report opens a window; who is not
               known to be dead and has not reported when it closes is out all the same. It may join again.
    boundary   A notice or a join waits for the end of the step in hand. Rank 0 asks between two steps (`boundary`) and
               tells the others over the group, so that all leave it after the same step. Who joins comes in then, and
               after an error. Before the group is there, whoever waits for the others' arrival asks.
    silence    A member without heartbeats is frozen and counts as dead. Its process has to be ended, or the others'
               collectives wait for their timeout.

A death that nobody reports changes nothing before the next boundary: the others are in no collective.

Members that hold state, as training ranks do, know what nobody else does. Who joins has to be told, so no error lets
anybody in. And they are never all let go: as long as all who live are under notice, they stay (`is_ending`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from src.core.types import Generation

WINDOW_S = 0.05
"""How long after the first report of an error the others' reports are waited for."""


class Membership:
    """The state machine.

    Args:
        members: of generation 0, in the order of their ranks.
        window_s: see `WINDOW_S`.
        heartbeat_timeout_s: a member that was silent for longer is frozen.
        hold_state: see the top of this module.
    """

    def __init__(
        self,
        members: Sequence[str],
        *,
        window_s: float = WINDOW_S,
        heartbeat_timeout_s: float = 10.0,
        hold_state: bool = False,
    ) -> None:
        for name, value in (("window_s", window_s), ("heartbeat_timeout_s", heartbeat_timeout_s)):
            if value <= 0:
                raise ValueError(f"Membership.{name} must be positive, got {value}")
        if len(set(members)) != len(members):
            raise ValueError(f"Membership.members must differ, got {list(members)}")
        self.current = Generation(0, tuple(members), len(members))
        self._window_s = window_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._hold_state = hold_state
        self._heard_s: dict[str, float] = {}
        self._reported: set[str] = set()
        self._leaving: set[str] = set()
        self._dead: set[str] = set()
        self._coming: list[str] = []
        self._broken_s: float | None = None
        self._admits = False  # whether the next generation lets in who waits to join

    @property
    def is_changing(self) -> bool:
        """Whether somebody comes or goes: at the next boundary this generation ends."""
        return bool(self._leaving or self._dead or self._coming) or self._broken_s is not None

    @property
    def is_ending(self) -> bool:
        """Whether the members hold state and are all about to go, and nobody comes: they had better save it."""
        living = self._living()
        return self._hold_state and self._leaving.issuperset(living) and bool(living) and not self._coming

    @property
    def broken_s(self) -> float | None:
        """When this generation ended, if it has."""
        return self._broken_s

    @property
    def due_s(self) -> float:
        """When the reports that are missing are no longer waited for."""
        return math.inf if self._broken_s is None else self._broken_s + self._window_s

    def includes(self, member: str) -> bool:
        """Whether the member belongs to this generation and has not been lost."""
        return member in self.current.members and member not in self._leaving | self._dead

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
            self._break(at_s, admits=not self._hold_state)

    def notice(self, at_s: float, member: str) -> None:
        """The member will be taken away: it stays until the next boundary."""
        self.heartbeat(at_s, member)
        self._coming = [other for other in self._coming if other != member]
        if member in self.current.members:
            self._leaving.add(member)

    def dead(self, at_s: float, member: str) -> None:
        """The member's process has ended, or will be ended: the others need not wait for its report."""
        self._heard_s.pop(member, None)
        self._coming = [other for other in self._coming if other != member]
        if member in self.current.members:
            self._dead.add(member)

    def join(self, at_s: float, member: str) -> None:
        """The member is warm and wants in. If it is listed, its earlier life ended unseen."""
        if self.includes(member):
            self.dead(at_s, member)
        self.heartbeat(at_s, member)
        if member not in self._coming:
            self._coming.append(member)

    def boundary(self, at_s: float, generation: int, *, admits: bool = True) -> bool:
        """Rank 0 of the generation stands between two steps, or a member waits for the others' arrival. True: all
        members drop the group and wait.

        Args:
            admits: whether it is a moment to end the generation for the sake of who waits to join.
        """
        if generation != self.current.number:
            return True
        staying = self._staying(self._living())
        all_stay = len(staying) == len(self.current.members)
        if all_stay and self._broken_s is None and not (admits and self._coming):
            return False
        self._reported.update(staying)
        self._break(at_s, admits=admits or not self._hold_state)
        return True

    def silence(self, at_s: float) -> list[str]:
        """Counts those as dead that were not heard of for too long, and returns them."""
        silent = [
            member
            for member in self.current.members
            if member not in self._dead and at_s - self._heard_s.get(member, at_s) > self._heartbeat_timeout_s
        ]
        for member in silent:
            self.dead(at_s, member)
        return silent

    # ---------------------------------------------------------------- decision

    def advance(self, at_s: float) -> Generation | None:
        """The next generation, if its time has come. Those who stay keep their order; who joins comes last."""
        if self.is_changing and not self._living():
            self._break(at_s, admits=True)  # nobody is there who could report or reach a boundary
        if self._broken_s is None:
            return None
        if not self._reported.issuperset(self._staying(self._living())) and at_s < self.due_s:
            return None
        survivors = self._staying([member for member in self._living() if member in self._reported])
        admitted = self._coming if self._admits else []
        self.current = Generation(self.current.number + 1, (*survivors, *admitted), len(survivors))
        self._coming = [] if self._admits else self._coming
        self._reported, self._dead, self._broken_s = set(), set(), None
        self._leaving.intersection_update(self.current.members)
        return self.current

    def _living(self) -> list[str]:
        return [member for member in self.current.members if member not in self._dead]

    def _staying(self, living: list[str]) -> list[str]:
        """Those who are to be in the next generation, if no others live."""
        staying = [member for member in living if member not in self._leaving]
        return living if self._hold_state and not staying else staying

    def _break(self, at_s: float, *, admits: bool) -> None:
        if self._broken_s is None:
            self._broken_s, self._admits = at_s, admits
