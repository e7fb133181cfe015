"""What a team's member does in its generations, told by a script: no group, no other processes."""

from __future__ import annotations

import threading

import pytest

from src.core.protocols import GroupLost
from src.core.types import Generation
from src.spot import weights
from src.spot.market import Notice
from src.spot.members import Introduction
from src.spot.team_worker import TeamWorker
from tests.spot.fakes import FakeEngine, saves
from tests.spot.test_worker import MEMBER, V0, V1, Script, lease

ME, OTHER = MEMBER.name, "spot-n-1.0"


class TeamScript(Script):
    """A queue and a team in one, so that `told` has everything in order.

    `pulls` holds leases, None for "the team changes", and errors that come up while the leader waits.
    """

    patience_s = 60.0

    def __init__(self, root, generations, pulls=()) -> None:
        super().__init__(root)
        self.generations = list(generations)
        self.pulls = list(pulls)

    def introduce(self):
        return Introduction("run", 0, self.root, 0.0, heartbeat_s=self.heartbeat_s, store_port=7)

    def join(self, joined):
        self.told.append(("join", joined.member.gpus, joined.fingerprint))
        return self.introduce()

    def pull(self, worker, *, meanwhile, every_s):
        assert every_s == 15.0
        pulled = self.pulls.pop(0)
        if isinstance(pulled, Exception):
            meanwhile()
        return pulled

    def push(self, worker, lease, results, report):
        self.told.append(("push", lease, len(results)))

    def commit(self, worker, lease, step, commits):
        pass

    def stand_down(self, worker):
        self.told.append(("stand down",))

    def next(self, after):
        self.told.append(("next", after))
        return self.generations.pop(0) if self.generations else None

    def broken(self, generation):
        self.told.append(("broken", generation))

    def boundary(self, generation, *, admits=True):
        self.told.append(("boundary", generation) if admits else ("still here?", generation))
        return True


class TeamFake(FakeEngine):
    """Writes down what is asked of its group; `lost` names the call at which the group breaks."""

    patience_s = 60.0

    def __init__(self, told, lost="", waits=False) -> None:
        super().__init__()
        self.told, self.lost, self.waits = told, lost, waits
        self.size = 1

    @property
    def fingerprint(self):
        return f"sp{self.size}"

    def form(self, team, generation, rank, *, store_port, is_over):
        assert (team, store_port) == ("sp0", 7)
        self.size = len(generation.members)
        self._tell("form", generation.number, rank)
        if self.waits and is_over():
            raise GroupLost("form")

    def drop(self):
        self.size = 1
        self._tell("drop")

    def announce(self, requests, *, resume=()):
        self._tell("announce", len(requests))

    def remind(self):
        self._tell("remind")

    def release(self):
        self._tell("release")

    def follow(self, prepare):
        self._tell("follow")
        prepare(V0)

    def serve(self, *arguments, **options):
        self._tell("serve")
        return super().serve(*arguments, **options)

    def _tell(self, what, *more):
        if what == self.lost:
            self.lost = ""
            raise GroupLost(what)
        self.told.append((what, *more))


@pytest.fixture
def published(tmp_path):
    weights.publish(tmp_path, V0, saves("w"))
    return tmp_path


def play(script: TeamScript, *, lost: str = "", waits: bool = False, notices=()) -> list[tuple]:
    engine = TeamFake(script.told, lost, waits)
    TeamWorker(name="sp0", member=MEMBER, engine=engine, transport=script, team=script, notices=notices).run()
    assert engine.size == 1, "it has left its group"
    return script.told


def test_a_leader_is_one_worker_with_the_gpus_of_its_generation(published):
    generations = [Generation(1, (ME,)), Generation(2, (ME, OTHER), 1)]
    script = TeamScript(published, generations, [None, lease(0, V0, 1), None])
    assert play(script) == [
        *[("next", 0), ("form", 1, 0), ("join", 1, "sp1"), ("boundary", 1), ("release",)],
        *[("stand down",), ("drop",)],
        *[("next", 1), ("form", 2, 0), ("join", 2, "sp2"), ("announce", 1), ("serve",), ("push", 0, 1)],
        *[("boundary", 2), ("release",), ("stand down",), ("drop",), ("next", 2)],
    ]


def test_a_follower_is_no_worker_and_loads_what_the_leader_serves(published):
    script = TeamScript(published, [Generation(4, (OTHER, ME))])
    assert play(script) == [("next", 0), ("form", 4, 1), ("follow",), ("drop",), ("next", 4)]


@pytest.mark.parametrize("lost", ["announce", "serve"])
def test_a_leader_whose_group_breaks_gives_its_lease_back_before_it_tells(published, lost):
    script = TeamScript(published, [Generation(1, (ME, OTHER))], [lease(5, V0, 1)])
    told = play(script, lost=lost)
    assert told[-5:] == [("push", 5, 0), ("stand down",), ("drop",), ("broken", 1), ("next", 1)]


@pytest.mark.parametrize("lost", ["form", "follow"])
def test_a_follower_whose_group_breaks_says_so(published, lost):
    script = TeamScript(published, [Generation(1, (OTHER, ME))])
    assert play(script, lost=lost)[-3:] == [("drop",), ("broken", 1), ("next", 1)]


def test_who_waits_for_the_others_asks_whether_they_will_come(published):
    script = TeamScript(published, [Generation(1, (OTHER, ME))])
    assert play(script, waits=True)[1:] == [("form", 1, 1), ("still here?", 1), ("drop",), ("broken", 1), ("next", 1)]


@pytest.mark.parametrize(("pulled", "lost"), [(GroupLost(), "remind"), (None, "release")])
def test_an_idle_leader_may_find_that_somebody_died(published, pulled, lost):
    script = TeamScript(published, [Generation(1, (ME, OTHER))], [pulled])
    assert play(script, lost=lost)[-4:] == [("stand down",), ("drop",), ("broken", 1), ("next", 1)]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_newcomer_loads_the_newest_policy_before_it_asks_to_be_let_in(published, damaged):
    weights.publish(published, V1, saves("newer"))
    if damaged:  # or retired while it reads
        (published / str(V1) / "weights.txt").unlink()
    script = TeamScript(published, [])
    engine = TeamFake(script.told)
    script.next = lambda after: script.told.append(engine.weights)
    TeamWorker(name="sp0", member=MEMBER, engine=engine, transport=script, team=script).run()
    assert script.told == ["" if damaged else "newer"]


def test_an_error_of_its_own_ends_the_process_and_the_group(published):
    script = TeamScript(published, [Generation(1, (OTHER, ME))])
    (published / str(V0) / "weights.txt").write_text("damaged")
    with pytest.raises(ValueError, match=r"weights\.txt is truncated or altered"):
        play(script)
    assert script.told[-2:] == [("follow",), ("drop",)]


def test_a_leader_that_fails_by_itself_is_still_a_member_so_that_the_attempt_counts(published):
    script = TeamScript(published, [Generation(1, (ME, OTHER))], [lease(0, V0, 1)])
    engine = TeamFake(script.told)

    def fail(*arguments, **options):
        raise MemoryError

    engine.serve = fail
    with pytest.raises(MemoryError):
        TeamWorker(name="sp0", member=MEMBER, engine=engine, transport=script, team=script).run()
    assert script.told[-2:] == [("announce", 1), ("drop",)]


def test_under_notice_a_lease_is_given_back_and_nobody_is_called_for_it(published):
    pulling = threading.Event()

    class Meanwhile:
        told = threading.Event()

        def wait(self, timeout_s):
            if self.told.is_set() or not pulling.wait(timeout_s):
                return None
            self.told.set()
            return Notice("n", 5.0)

    class Late(TeamScript):
        def pull(self, worker, *, meanwhile, every_s):
            pulling.set()
            while not worker_.noticed:
                pass
            return super().pull(worker, meanwhile=meanwhile, every_s=every_s)

    script = Late(published, [Generation(1, (ME, OTHER))], [lease(3, V0, 1), None])
    engine = TeamFake(script.told)

    class Watched(TeamWorker):
        @property
        def noticed(self):
            return self._noticed.is_set()

    worker_ = Watched(name="sp0", member=MEMBER, engine=engine, transport=script, team=script, notices=[Meanwhile()])
    worker_.run()
    told = [row for row in script.told if row[0] != "notice"]
    assert told[2:6] == [("join", 2, "sp2"), ("push", 3, 0), ("boundary", 1), ("release",)]


def test_what_a_process_loaded_while_it_stood_by_is_not_loaded_again(published):
    script = TeamScript(published, [Generation(1, (OTHER, ME))])
    engine = TeamFake(script.told)
    TeamWorker(name="sp0", member=MEMBER, engine=engine, transport=script, team=script, held=V0).run()
    assert engine.weights == ""
