"""The elastic groups of a run by name: who shares work with whom at this moment. Pure; time comes with each event.

A team is a `Membership`: training ranks are one, the spot workers that share sequences are one for each group of
places. A process is a member of one team, from when it enlists until it is dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from src.core.types import Generation
from src.spot.membership import WINDOW_S, Membership


@dataclass(frozen=True)
class Regrouped:
    """A team has a new generation."""

    team: str
    generation: Generation
    broken_s: float
    """When the one before ended: the first report of an error, or the boundary."""


class Teams:
    """All teams of a run.

    Args:
        heartbeat_timeout_s, window_s: see `Membership`.
    """

    def __init__(self, *, heartbeat_timeout_s: float, window_s: float = WINDOW_S) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._window_s = window_s
        self._teams: dict[str, Membership] = {}
        self._team_of: dict[str, str] = {}
        self._leaving: set[str] = set()
        self._entered: dict[str, int] = {}  # the latest generation that a member was told of

    @property
    def due_s(self) -> float:
        """When `advance` is to be called next, if nothing happens before; infinity if it need not."""
        return min((team.due_s for team in self._teams.values()), default=float("inf"))

    def found(self, team: str, members: Sequence[str], *, window_s: float = WINDOW_S, hold_state: bool = False) -> None:
        """A team whose first generation is known before anybody is there. For the arguments see `Membership`."""
        self._teams[team] = Membership(
            members,
            window_s=window_s,
            heartbeat_timeout_s=self._heartbeat_timeout_s,
            hold_state=hold_state,
        )
        self._team_of.update(dict.fromkeys(members, team))

    # Events

    def enlist(self, at_s: float, team: str, member: str) -> None:
        """The member is warm and waits for a generation with it. It may say so again at any time."""
        self._team_of[member] = team
        if team not in self._teams:
            self.found(team, (), window_s=self._window_s)
        membership = self._teams[team]
        if member not in self._leaving and not membership.includes(member):
            membership.join(at_s, member)

    def entered(self, member: str, generation: int) -> None:
        """The member was told of this generation, and is in it until it asks for a later one."""
        self._entered[member] = generation

    def heartbeat(self, at_s: float, member: str) -> None:
        """The member is alive."""
        if member in self._team_of:
            self._of(member).heartbeat(at_s, member)

    def broken(self, at_s: float, member: str, generation: int) -> None:
        """The member has dropped the group of this generation after an error."""
        self._of(member).broken(at_s, member, generation)

    def notice(self, at_s: float, member: str) -> None:
        """The member will be taken away, and leaves at the next boundary; who has not come yet is not let in."""
        self._leaving.add(member)
        if member in self._team_of:
            self._of(member).notice(at_s, member)

    def dead(self, at_s: float, member: str) -> bool:
        """The member's process has ended. Returns whether it ever was in a team."""
        if member not in self._team_of:
            return False
        self._leaving.add(member)
        self._of(member).dead(at_s, member)
        return True

    def boundary(self, at_s: float, member: str, generation: int, *, admits: bool = True) -> bool:
        """The first member of a generation stands between two steps, or a member waits for the others' arrival. True:
        all leave the group now."""
        return self._of(member).boundary(at_s, generation, admits=admits)

    def silence(self, at_s: float) -> list[str]:
        """Counts those as dead that were not heard of for too long; they are frozen, and somebody has to end them."""
        silent = [member for team in self._teams.values() for member in team.silence(at_s)]
        self._leaving.update(silent)
        return silent

    # Decisions

    @property
    def is_ending(self) -> bool:
        """Whether the members of a team that hold state are all about to go."""
        return any(team.is_ending for team in self._teams.values())

    def is_broken(self, member: str) -> bool:
        """Whether an error has ended the member's generation, and the next one is not there yet."""
        return member in self._team_of and self._of(member).broken_s is not None

    def is_changing(self, member: str) -> bool:
        """Whether the member's generation ends at its next boundary, or has ended without the member's knowledge."""
        if member not in self._team_of:
            return False
        team = self._of(member)
        return team.is_changing or self._entered.get(member, team.current.number) < team.current.number

    def generation(self, member: str, after: int) -> Generation | None:
        """The member's generation, if it is a later one than `after` and includes it."""
        current = self._of(member).current
        return current if current.number > after and member in current.members else None

    def is_out(self, member: str) -> bool:
        """Whether the member belongs to no generation any more, and to no later one."""
        return member in self._leaving and member not in self._of(member).current.members

    def advance(self, at_s: float) -> list[Regrouped]:
        """The generations whose time has come."""
        regrouped = []
        for name, team in self._teams.items():
            broken_s = team.broken_s
            generation = team.advance(at_s)
            if generation is not None:
                regrouped.append(Regrouped(name, generation, at_s if broken_s is None else broken_s))
        return regrouped

    def _of(self, member: str) -> Membership:
        if member not in self._team_of:
            raise ValueError(f"{member} is in no team")
        return self._teams[self._team_of[member]]
