"""What an actor keeps until it is acked."""

import asyncio

import numpy as np
import pytest

from capo.protocol.errors import CapoError, ProtocolError
from capo.protocol.frames import Limits, decode
from capo.protocol.messages import ToLearner, Welcome
from capo.protocol.outbox import MAX_BATCH_RECORDS, Outbox, Parcel, size_of_records
from tests.protocol.wire import make_end, make_step


def make_welcome(last_sequence: int = 0, window: int = 2, **fields) -> Welcome:
    return Welcome(
        run_id="r",
        learner_name="l",
        last_sequence=last_sequence,
        window=window,
        heartbeat_s=1.0,
        dead_after_s=5.0,
        setup=None,
        **fields,
    )


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def outbox():
    outbox = Outbox(Limits())
    outbox.welcome(make_welcome())
    return outbox


def put(outbox: Outbox, loop, *steps, ends=()) -> Parcel:
    parcel = Parcel(tuple(steps), tuple(ends), size_of_records(steps, ends), loop.create_future())
    outbox.put(parcel)
    return parcel


def take_due(outbox: Outbox) -> list:
    deliveries = []
    while (frames := outbox.due()) is not None:
        deliveries.append(decode(frames, ToLearner, Limits()))
        outbox.sent()
    return deliveries


def indices(delivery) -> list[int]:
    return [step.index for step in delivery.steps]


def test_what_waits_for_the_window_goes_out_as_one_delivery_in_order(outbox, loop):
    first = [put(outbox, loop, make_step(index=index)) for index in range(5)]
    outbox.pack()
    assert [indices(d) for d in take_due(outbox)] == [[0, 1, 2, 3, 4]]
    assert all(parcel.packed.done() for parcel in first)


def test_nothing_is_numbered_before_the_first_welcome(loop):
    outbox = Outbox(Limits())
    parcel = put(outbox, loop, make_step())
    outbox.pack()
    assert outbox.due() is None
    assert not parcel.packed.done()


def test_a_full_window_makes_records_wait_until_an_ack(outbox, loop):
    for index in range(2):
        put(outbox, loop, make_step(index=index))
        outbox.pack()
    third = put(outbox, loop, make_step(index=2))
    outbox.pack()
    assert [d.sequence for d in take_due(outbox)] == [1, 2]
    assert not third.packed.done()
    assert outbox.ack(1)
    outbox.pack()
    assert third.packed.done()
    assert [d.sequence for d in take_due(outbox)] == [3]


def test_a_batch_is_bounded_and_calls_are_not_split(outbox, loop):
    half = [make_step(index=index) for index in range(MAX_BATCH_RECORDS // 2 + 1)]
    put(outbox, loop, *half)
    put(outbox, loop, *half)
    outbox.pack()
    assert [len(d.steps) for d in take_due(outbox)] == [len(half), len(half)]


def test_steps_and_ends_of_a_call_travel_together(outbox, loop):
    put(outbox, loop, make_step(), ends=[make_end()])
    outbox.pack()
    (delivery,) = take_due(outbox)
    assert len(delivery.steps) == len(delivery.ends) == 1


def test_rewind_makes_all_unacked_due_again_in_order(outbox, loop):
    for index in range(2):
        put(outbox, loop, make_step(index=index))
        outbox.pack()
    assert len(take_due(outbox)) == 2
    assert take_due(outbox) == []
    outbox.rewind()
    assert [d.sequence for d in take_due(outbox)] == [1, 2]


def test_a_welcome_drops_what_is_committed_and_makes_the_rest_due(outbox, loop):
    for index in range(2):
        put(outbox, loop, make_step(index=index))
        outbox.pack()
    take_due(outbox)
    outbox.welcome(make_welcome(last_sequence=1))
    assert [d.sequence for d in take_due(outbox)] == [2]


def test_old_acks_are_no_news(outbox, loop):
    put(outbox, loop, make_step())
    outbox.pack()
    assert outbox.ack(1)
    assert not outbox.ack(1)
    assert not outbox.ack(0)
    assert outbox.empty


def test_an_ack_while_resending_does_not_skip_a_delivery(outbox, loop):
    for index in range(2):
        put(outbox, loop, make_step(index=index))
        outbox.pack()
    take_due(outbox)
    outbox.rewind()
    outbox.ack(1)
    assert [d.sequence for d in take_due(outbox)] == [2]


def test_a_learner_that_lost_acked_deliveries_is_an_error(outbox, loop):
    put(outbox, loop, make_step())
    outbox.pack()
    outbox.ack(1)
    with pytest.raises(ProtocolError, match="acked deliveries up to 1 but now knows only 0"):
        outbox.welcome(make_welcome(last_sequence=0))


def test_a_learner_that_knows_too_much_is_an_error(outbox):
    with pytest.raises(ProtocolError, match="has 5 deliveries of this actor, which sent only 0"):
        outbox.welcome(make_welcome(last_sequence=5))
    with pytest.raises(ProtocolError, match="acked delivery 5, but only 0"):
        outbox.ack(5)


def test_withdrawn_records_are_not_delivered(outbox, loop):
    kept = put(outbox, loop, make_step(index=0))
    gone = put(outbox, loop, make_step(index=1))
    outbox.withdraw(gone)
    outbox.pack()
    assert [indices(d) for d in take_due(outbox)] == [[0]]
    outbox.withdraw(kept)  # too late: it has a sequence
    assert outbox.num_unacked == 1


def test_a_call_too_large_for_the_learner_fails_alone(outbox, loop):
    outbox.welcome(make_welcome(max_message_bytes=4096))
    large = put(outbox, loop, make_step(observation=np.zeros(300_000, np.int32)))
    small = put(outbox, loop, make_step(index=1))
    outbox.pack()
    with pytest.raises(ProtocolError, match="at most 4096 are allowed"):
        large.packed.result()
    small.packed.result()
    assert [(d.sequence, indices(d)) for d in take_due(outbox)] == [(1, [1])]


def test_the_end_reaches_everyone_who_waits(loop):
    outbox = Outbox(Limits())
    parcel = put(outbox, loop, make_step())
    outbox.fail(CapoError("over"))
    with pytest.raises(CapoError, match="over"):
        parcel.packed.result()


def test_sizes_are_not_underestimated(outbox, loop):
    step = make_step(
        length=50,
        entropies=np.zeros(50, np.float32),
        info={"reward/format": 1.0},
        state_key="é" * 9,
    )
    put(outbox, loop, step, ends=[make_end(metrics={"a": 1.0}, error="x" * 99)])
    outbox.pack()
    frames = outbox.due()
    assert sum(map(len, frames)) <= size_of_records([step], [make_end(error="x" * 99)]) + 64


def test_ends_are_unacked_from_packing_until_their_ack(outbox, loop):
    ended = make_end()
    put(outbox, loop, make_step(), ends=(ended,))
    assert outbox.unacked_ends == ()
    outbox.pack()
    assert outbox.unacked_ends == (ended.episode_id,)
    outbox.ack(1)
    assert outbox.unacked_ends == ()
