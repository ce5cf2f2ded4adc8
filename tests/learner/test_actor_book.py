"""The book of actors: room, what an actor never heard of, weights, and who is awaited."""

from capo.learner.actor_book import RECONNECTED, RETRY_WEIGHTS_S, RETURN_GRACE, ActorBook, refusal
from capo.learner.weights import BroadcastReport
from capo.protocol.link import LAST_RETRY_S
from capo.protocol.messages import ActorHeartbeat
from tests.protocol.wire import make_hello

DEAD_AFTER_S = 10.0


def book(holders: tuple[str, ...] = (), before: tuple[str, ...] = ()) -> ActorBook:
    return ActorBook(
        max_capacity=4, dead_after_s=DEAD_AFTER_S, holders=holders, before=before, now=0.0
    )


def join(actors: ActorBook, name: str, *playing: str, weights_version: int = 0) -> bool:
    hello = make_hello(name, capacity=9, weights_version=weights_version)
    return actors.join(hello, set(playing), now=0.0)


def dropped(reason: str) -> BroadcastReport:
    return BroadcastReport(
        version=1,
        epoch=1,
        updated=(),
        dropped={"ann": reason},
        num_bytes=0,
        stage_s=0.0,
        form_s=0.0,
        transfer_s=0.0,
    )


def test_an_actor_gets_no_more_than_the_run_allows_and_only_with_weights_in_range() -> None:
    actors = book()
    join(actors, "ann", "x.1", weights_version=3)
    assert actors.free_slots(3, 3) == {"ann": 3}
    assert actors.free_slots(4, 9) == actors.free_slots(0, 2) == {}
    actors.granted("ann", ["y.1", "z.1"])
    actors.no_longer_plays("ann", "x.1")
    assert actors.free_slots(-5, 9) == {"ann": 2}


def test_an_actor_is_invited_once_its_engine_is_up_and_gets_work_once_it_has_weights() -> None:
    actors = book()
    join(actors, "ann", weights_version=-1)
    assert actors.invitable(None, 0.0) == []
    actors.heard("ann", ActorHeartbeat(ready=True), 1.0)
    assert actors.invitable(None, 1.0) == ["ann"]
    assert actors.free_slots(-1, 9) == {}  # its engine is up, but with no weights of the run
    actors.engine_up("ann", 0)
    assert actors.free_slots(-1, 9) == {"ann": 4}
    assert actors.invitable(0, 1.0) == []


def test_what_an_actor_has_not_heard_of_for_long_is_no_longer_played_by_it() -> None:
    actors = book()
    join(actors, "ann", "x.1", "y.1")
    unaware = ActorHeartbeat(held_leases=("y.1",))
    assert actors.heard("ann", unaware, 1.0) == []
    assert actors.heard("ann", unaware, 1.0 + DEAD_AFTER_S) == []
    assert actors.heard("ann", unaware, 1.1 + DEAD_AFTER_S) == ["x.1"]
    assert actors.statuses(20.0)[0].playing == 1


def test_an_actor_that_hears_of_its_lease_late_keeps_it() -> None:
    actors = book()
    join(actors, "ann", "x.1")
    actors.heard("ann", ActorHeartbeat(held_leases=()), 1.0)
    actors.heard("ann", ActorHeartbeat(held_leases=("x.1",)), 2.0)
    assert actors.heard("ann", ActorHeartbeat(held_leases=()), 5.0 + DEAD_AFTER_S) == []


def test_who_missed_a_broadcast_is_invited_later_and_who_reconnected_at_once() -> None:
    actors = book()
    join(actors, "ann")
    actors.weights_arrived(dropped("it was too slow"), 5.0)
    assert actors.invitable(1, 5.0 + RETRY_WEIGHTS_S - 0.1) == []
    assert actors.invitable(1, 5.0 + RETRY_WEIGHTS_S) == ["ann"]
    actors.weights_arrived(dropped(RECONNECTED), 100.0)
    assert actors.invitable(1, 100.0) == ["ann"]


def test_holders_that_do_not_come_back_are_told_once() -> None:
    actors = book(holders=("ann", "bob"))
    join(actors, "ann")
    limit = RETURN_GRACE * DEAD_AFTER_S
    assert actors.take_overdue(limit) == []
    assert actors.take_overdue(limit + 0.1) == ["bob"]
    assert actors.take_overdue(limit + 0.2) == []


def test_an_actor_of_before_may_return_for_a_while_unless_it_has() -> None:
    actors = book(before=("ann",))
    limit = DEAD_AFTER_S + 2 * LAST_RETRY_S
    assert actors.may_return(limit - 0.1)
    assert not actors.may_return(limit)
    assert not join(actors, "ann")
    assert not actors.may_return(0.0)
    assert join(actors, "ann")  # a new connection of one that is connected


def test_an_actor_of_another_run_or_tokenizer_is_refused() -> None:
    assert refusal(make_hello("ann", run_id=""), "run", "digest") == ""
    assert "serves run run, not other" in refusal(
        make_hello("ann", run_id="other"), "run", "digest"
    )
    assert "tokenizer" in refusal(make_hello("ann", tokenizer_digest="other"), "run", "digest")
