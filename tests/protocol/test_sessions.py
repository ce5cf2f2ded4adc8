"""Which deliveries of an actor are taken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capo.protocol.messages import Welcome
from capo.protocol.sessions import Session, Verdict


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
