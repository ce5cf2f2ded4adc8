"""Which deliveries of an actor are taken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capo.protocol.messages import Welcome
from capo.protocol.sessions import Session, Sessions, Verdict


def make_session(last_sequence: int = 0, window: int = 3) -> Session:
    return Session("actor-1", b"one", "", make_welcome(last_sequence, window), now=0.0)


def make_welcome(last_sequence: int, window: int = 3) -> Welcome:
    return Welcome(
        run_id="r",
        learner_name="l",
        last_sequence=last_sequence,
        window=window,
        heartbeat_s=1.0,
        dead_after_s=5.0,
        setup=None,
    )


def test_deliveries_are_judged_by_what_was_committed_and_taken():
    session = make_session(last_sequence=4)
    session.accepted = 6
    verdicts = {sequence: session.judge(sequence) for sequence in (1, 4, 5, 6, 7, 8)}
    assert verdicts == {
        1: Verdict.COMMITTED,
        4: Verdict.COMMITTED,
        5: Verdict.PENDING,
        6: Verdict.PENDING,
        7: Verdict.NEXT,
        8: Verdict.GAP,
    }


def test_no_more_than_the_window_is_taken_before_a_commit():
    session = make_session(window=2)
    session.accepted = 2
    assert session.judge(3) is Verdict.FULL
    session.committed = 1
    assert session.judge(3) is Verdict.NEXT


def test_a_new_connection_keeps_what_waits_for_the_writer_and_drops_what_waited_to_be_sent():
    session = make_session()
    session.accepted = 2
    session.outgoing.append([b"old"])
    session.connect(b"two", "", make_welcome(0), now=1.0)
    assert session.identity == b"two"
    assert session.judge(2) is Verdict.PENDING
    assert not session.outgoing


def test_the_run_file_may_know_more_than_the_session():
    session = make_session()
    session.connect(b"two", "", make_welcome(9), now=1.0)
    assert session.judge(9) is Verdict.COMMITTED
    assert session.judge(10) is Verdict.NEXT


def test_a_window_without_room_is_an_error():
    with pytest.raises(ValueError, match="window of 0"):
        make_session(window=0)


def test_silence_is_counted_from_the_last_message():
    session = make_session()
    session.last_heard = 10.0
    assert not session.silent(15.0)
    assert session.silent(15.1)


def test_an_actor_is_found_by_its_newest_connection_alone():
    sessions = Sessions()
    first = sessions.connect("actor-1", b"one", "", make_welcome(0), now=0.0)
    other = sessions.connect("actor-2", b"other", "", make_welcome(0), now=0.0)
    again = sessions.connect("actor-1", b"two", "key", make_welcome(0), now=1.0)
    assert again is first
    assert again.key == "key"
    assert sessions.of_identity(b"one") is None
    assert sessions.of_identity(b"two") is first
    assert sessions.of_identity(b"other") is other
    assert list(sessions) == [first, other]


def test_a_broken_connection_leaves_the_actor_known_by_its_id():
    sessions = Sessions()
    session = sessions.connect("actor-1", b"one", "", make_welcome(0), now=0.0)
    sessions.disconnect(session)
    sessions.disconnect(session)
    assert session.identity is None
    assert sessions.of_identity(b"one") is None
    assert sessions.of_actor("actor-1") is session


def test_a_lost_actor_is_remembered_while_the_writer_has_deliveries_of_it():
    sessions = Sessions()
    session = sessions.connect("actor-1", b"one", "", make_welcome(4), now=0.0)
    sessions.disconnect(session)
    session.accepted = 5
    sessions.forget(session)
    assert sessions.of_actor("actor-1") is session
    session.committed = 5
    sessions.forget(session)
    assert sessions.of_actor("actor-1") is None
    sessions.forget(session)


@given(st.lists(st.integers(1, 12), max_size=60), st.integers(1, 4))
def test_whatever_arrives_is_taken_in_order_and_once(arrivals, window):
    session = make_session(window=window)
    taken = []
    for position, sequence in enumerate(arrivals):
        if session.judge(sequence) is Verdict.NEXT:
            session.accepted = sequence
            taken.append(sequence)
        if position % 3 == 0:
            session.committed = session.accepted
        assert session.accepted - session.committed <= window
    assert taken == list(range(1, len(taken) + 1))
