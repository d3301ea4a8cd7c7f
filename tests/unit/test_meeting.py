"""Who is to blame: what ranks say to each other through the store and in shared memory, without any process."""

import mmap
import threading
from datetime import timedelta
from itertools import pairwise

import pytest
from torch._C._distributed_c10d import HashStore

from lanewise.engine import meeting as meetings
from lanewise.engine.meeting import Meeting
from lanewise.engine.transport.suspects import Suspects
from lanewise.errors import ExchangeError, HandshakeError, PeerLostError

SHORT = timedelta(seconds=0.2)


def three(store=None, server=None):
    """The meetings of three ranks on one store."""
    store = store or HashStore()
    return [Meeting(store, rank, 3, SHORT, server) for rank in range(3)]


class Broken:
    """A store whose server has gone after the first question."""

    def __init__(self, error=None):
        self.asked = 0
        self.error = error or RuntimeError("Broken pipe\nwith a page about it")

    def add(self, key, amount):
        self.asked += 1
        if self.asked > 1:
            raise self.error
        return 1

    def set(self, key, value):
        self.add(key, 0)

    def check(self, keys):
        self.add("", 0)


class Silent(Broken):
    """A store whose server is stopped after the first question."""

    def add(self, key, amount):
        self.asked += 1
        if self.asked > 1:
            threading.Event().wait(5)
        return 1


def test_everybody_learns_what_everybody_tells():
    ranks = three()
    seen = []
    for rank in (1, 2):
        threading.Thread(target=ranks[rank].tell_all, args=("hello", {"rank": rank})).start()
    told = ranks[0].tell_all("hello", {"rank": 0}, lambda peer, value: seen.append((peer, value["rank"])))
    assert told == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert sorted(seen) == [(0, 0), (1, 1), (2, 2)]


def test_a_rank_that_is_started_twice():
    store = HashStore()
    Meeting(store, 1, 3, SHORT, None)
    with pytest.raises(
        HandshakeError, match=r"rank 1 of this launch was started twice; this process \(the sec"
    ):
        Meeting(store, 1, 3, SHORT, None)


def test_ranks_that_do_not_come():
    ranks = three()
    with pytest.raises(PeerLostError) as caught:
        ranks[0].tell_all("hello", None)
    assert caught.value.ranks == (1, 2)
    assert str(caught.value) == (
        "rank 0 waited in 'hello': rank 1 and rank 2 did not come within 0.2 s. Look at that rank's own output; it may "
        "have failed or not started."
    )


def test_a_rank_that_has_ended_is_not_waited_for():
    first, *_ = three()
    first._timeout = timedelta(seconds=60)
    first.ended = lambda: (2,)
    with pytest.raises(PeerLostError, match=r"rank 0 waited in 'hello': rank 2 has ended\. Look") as caught:
        first.tell_all("hello", None)
    assert caught.value.ranks == (2,)


def test_a_rank_that_gave_up_because_of_another_is_not_to_blame():
    ranks = three()
    ranks[1].give_up(2, "")
    ranks[2].give_up(None, "step 3, lane 1; it failed with ValueError: no")
    ranks[2].give_up(None, "what is said first counts")
    ranks[0].ended = lambda: (1,)
    with pytest.raises(PeerLostError) as caught:
        ranks[0].tell_all("shared/1/memory", None)
    assert caught.value.ranks == (2,)
    assert str(caught.value).startswith(
        "rank 0 waited in 'shared/1/memory': rank 2 is the one that rank 1 waited for (step 3, lane 1; it failed with "
        "ValueError: no)."
    )


def test_blame_goes_from_rank_to_rank():
    ranks = three()
    assert ranks[0].blame(1, is_late=False) == (1, ""), "it has said nothing"
    ranks[2].give_up(0, "")
    assert ranks[1].blame(2, is_late=False) == (0, ""), "it gave up on the one that asks"
    ranks = three()
    ranks[1].give_up(2, "")
    ranks[2].give_up(None, "step 3, update; it failed")
    assert ranks[0].blame(1, is_late=False) == (2, "step 3, update; it failed")


@pytest.mark.parametrize(
    ("kind", "reason"), [(Broken, "Broken pipe"), (Silent, r"it did not answer within 0\.2 s")]
)
def test_a_store_that_is_gone(kind, reason):
    with pytest.raises(
        ExchangeError, match=rf"rank 1 lost the launcher's store \({reason}\)\. Look at the launcher"
    ):
        Meeting(kind(), 1, 3, SHORT, None).tell_all("hello", None)
    rule = rf"rank 1 lost rank 0, which serves the store of this run \({reason}\)\. Look at that rank's own output"
    with pytest.raises(PeerLostError, match=rule) as caught:
        Meeting(kind(), 1, 3, SHORT, 0).tell_all("hello", None)
    assert caught.value.ranks == (0,)


@pytest.mark.parametrize("kind", [Broken, Silent])
def test_a_store_that_does_not_answer_is_not_asked_again(kind, monkeypatch):
    monkeypatch.setattr(meetings, "_GRACE", timedelta(seconds=0.05))
    store = kind()
    last = Meeting(store, 2, 3, SHORT, 0)
    assert last.blame(1, is_late=False) == (0, ""), "it serves the store that is gone"
    last.part(in_peace=False)
    assert store.asked == 2
    store = kind()
    last = Meeting(store, 2, 3, SHORT, 0)
    last.ended = lambda: (0,)
    assert last.blame(1, is_late=False) == (0, "")
    assert store.asked == 1


def test_who_serves_the_store_leaves_last(monkeypatch):
    """A rank that said why it failed and then ended counts once."""
    monkeypatch.setattr(meetings, "_GRACE", timedelta(seconds=30))
    ranks = three(server=0)
    ranks[1].give_up(None, "it failed")
    ranks[1].part(in_peace=False)
    ranks[0].ended = lambda: (1,)
    leaving = threading.Thread(target=ranks[0].part, args=(False,))
    leaving.start()
    leaving.join(0.3)
    assert leaving.is_alive(), "rank 2 may still ask"
    assert ranks[2].blame(1, is_late=False) == (1, "it failed")
    ranks[2].part(in_peace=False)
    leaving.join(5)
    assert not leaving.is_alive()


def test_a_run_that_is_over_waits_for_all():
    ranks = three()
    first = threading.Thread(target=ranks[0].part, args=(True,))
    first.start()
    first.join(0.1)
    assert first.is_alive()
    for rank in ranks[1:]:
        threading.Thread(target=rank.part, args=(True,)).start()
    first.join(3)
    assert not first.is_alive()


def together(ranks, call):
    """Rank 0 joins with a call of its own, the others with one that succeeds."""
    for rank in ranks[1:]:
        threading.Thread(target=rank.join, args=(lambda: None, "the connecting of ranks")).start()
    return ranks[0].join(call, "the connecting of ranks")


def fails():
    raise RuntimeError(
        "[/build/gloo/pair.cc:537] connect: Connection timed out. This is typically caused by a host."
    )


def test_joining(monkeypatch):
    monkeypatch.setattr(meetings, "_GRACE", timedelta(0))
    assert together(three(), lambda: "a group") == "a group"
    rule = r"rank 0 could not connect to all other ranks \(connect: Connection timed out\)\. A rank may have died"
    with pytest.raises(PeerLostError, match=rule) as caught:
        together(three(), fails)
    assert caught.value.ranks == ()
    with pytest.raises(
        PeerLostError, match=r"could not connect to all other ranks \(no answer within 0\.2 s\)"
    ):
        together(three(), threading.Event().wait)
    ranks = three()
    ended = iter([(), (), ()])
    ranks[0].ended = lambda: next(ended, (1,))
    with pytest.raises(PeerLostError, match=r"rank 0 was in the connecting of ranks: rank 1 has ended\."):
        together(ranks, threading.Event().wait)


def suspects():
    pages = [mmap.mmap(-1, 4096) for _ in range(4)]
    return [Suspects(pages, 192, rank) for rank in range(4)]


def test_the_rank_that_all_wait_for_in_the_end_is_behind_a_wait():
    ranks = suspects()
    for waiting, awaited in pairwise(range(4)):
        ranks[waiting].await_(awaited)
    assert ranks[0].behind(1, has_ended=False) == 3
    assert ranks[0].behind(1, has_ended=True) == 1, "who has ended waits for nobody"
    ranks[1].accuse(2)
    assert ranks[0].behind(1, has_ended=True) == 3, "unless it has said why"
    ranks[1].await_(None)
    ranks[2].await_(None)
    assert ranks[0].behind(1, has_ended=False) == 2
    ranks[2].await_(0)
    assert ranks[0].behind(1, has_ended=False) == 2, "a circle"
