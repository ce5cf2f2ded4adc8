"""The server against actors made of bare sockets, on loopback."""

import threading
import time

import msgspec
import numpy as np
import pytest
import zmq

from capo.protocol.errors import CapoError, ConfigError, ProtocolError, StorageFullError
from capo.protocol.frames import Limits, encode
from capo.protocol.messages import (
    PROTOCOL_VERSION,
    Ack,
    ActorHeartbeat,
    Delivery,
    Drain,
    Goodbye,
    Grant,
    LearnerHeartbeat,
    Ready,
    Refused,
    Reintroduce,
    Welcome,
)
from capo.protocol.server import Server
from capo.protocol.sessions import MAX_OUTGOING
from tests.protocol.wire import Ledger, RawActor, make_hello, make_step, wait_until


@pytest.fixture
def actor(server):
    with RawActor(server.address) as actor:
        yield actor


def test_a_hello_is_answered_with_the_handlers_welcome(server, ledger, actor):
    ledger.last["actor-1"] = 7
    welcome = actor.introduce()
    assert (welcome.run_id, welcome.last_sequence, welcome.window) == ("run-1", 7, 8)
    assert welcome.max_message_bytes == Limits().max_message_bytes
    assert [hello.actor_id for hello in ledger.hellos] == ["actor-1"]


@pytest.mark.parametrize(
    ("version", "side"), [(PROTOCOL_VERSION - 1, "actor"), (PROTOCOL_VERSION + 1, "learner")]
)
def test_another_protocol_version_is_refused_saying_which_side_to_upgrade(
    server, ledger, actor, version, side
):
    actor.send(make_hello(protocol_version=version))
    refused = actor.receive()
    assert isinstance(refused, Refused)
    assert f"upgrade capo-rl on the {side}'s machine" in refused.reason
    assert ledger.hellos == []


def test_a_hello_of_a_future_shape_is_refused_for_its_version(server, ledger, actor):
    actor.send_frames([msgspec.msgpack.encode({"type": "Hello", "protocol_version": 99, "me": 1})])
    assert "upgrade capo-rl on the learner's machine" in actor.receive().reason


def test_the_handler_can_refuse(server, ledger, actor):
    ledger.answer = Refused(reason="your tokenizer is another")
    actor.send(make_hello())
    assert actor.receive() == Refused(reason="your tokenizer is another")
    actor.send(Ready())
    assert isinstance(actor.receive(), Reintroduce)
    assert ledger.controls == []


def test_a_delivery_is_committed_and_then_acked(server, ledger, actor):
    actor.introduce()
    ledger.gate.clear()
    actor.deliver(1, make_step(length=5))
    assert actor.receive(0.2) is None
    ledger.gate.set()
    assert actor.receive() == Ack(sequence=1)
    committed = ledger.committed[("lease.0", 0)]
    np.testing.assert_array_equal(committed.action, np.arange(5, dtype=np.int32))


def test_deliveries_that_arrive_during_a_commit_are_committed_together(server, ledger, actor):
    actor.introduce()
    ledger.gate.clear()
    actor.deliver(1, make_step(index=1))
    wait_until(lambda: ledger.entered == 1, "the first is being committed")
    for sequence in range(2, 6):
        actor.deliver(sequence, make_step(index=sequence))
    wait_until(lambda: server.stats.deliveries == 5, "all have arrived")
    ledger.gate.set()
    assert [actor.receive().sequence, actor.receive().sequence] == [1, 5]
    assert ledger.groups == [1, 4]


def test_a_duplicate_is_acked_again_and_not_committed_again(server, ledger, actor):
    actor.introduce()
    actor.deliver(1, make_step())
    assert actor.receive() == Ack(sequence=1)
    actor.deliver(1, make_step())
    assert actor.receive() == Ack(sequence=1)
    assert server.stats.duplicates == 1
    assert ledger.doubled == []


def test_a_duplicate_of_what_is_being_committed_is_dropped(server, ledger, actor):
    actor.introduce()
    ledger.gate.clear()
    actor.deliver(1, make_step())
    actor.deliver(1, make_step())
    wait_until(lambda: server.stats.duplicates == 1, "the duplicate has arrived")
    ledger.gate.set()
    assert actor.receive() == Ack(sequence=1)
    assert ledger.doubled == []


def test_deliveries_after_a_gap_are_ignored_until_it_is_filled(server, ledger, actor):
    actor.introduce()
    actor.deliver(2, make_step(index=2))
    wait_until(lambda: server.stats.gaps == 1, "the gap is seen")
    actor.deliver(1, make_step(index=1))
    assert actor.receive() == Ack(sequence=1)
    actor.deliver(2, make_step(index=2))
    assert actor.receive() == Ack(sequence=2)
    assert ledger.order == [("lease.0", 1), ("lease.0", 2)]


def test_no_more_than_the_window_is_held_for_one_actor(server, ledger, actor):
    ledger.window = 2
    actor.introduce()
    ledger.gate.clear()
    for sequence in (1, 2, 3):
        actor.deliver(sequence, make_step(index=sequence))
    wait_until(lambda: server.stats.over_window == 1, "the third is turned away")
    ledger.gate.set()
    wait_until(lambda: ledger.last["actor-1"] == 2, "two are committed")
    actor.deliver(3, make_step(index=3))
    wait_until(lambda: ledger.last["actor-1"] == 3, "the third is taken")


def test_memory_for_what_waits_is_bounded_over_all_actors(ledger):
    server = Server("tcp://127.0.0.1:0", ledger, max_pending_bytes=1000)
    with RawActor(server.start()) as one:
        one.introduce()
        ledger.gate.clear()
        one.deliver(1, make_step(length=50))
        one.deliver(2, make_step(index=1, length=50))
        wait_until(lambda: server.stats.over_memory == 1, "the second is turned away")
        ledger.gate.set()
        assert one.receive() == Ack(sequence=1)
        one.deliver(2, make_step(index=1, length=50))
        assert one.receive() == Ack(sequence=2)
    server.close()


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (make_step(reward=float("nan")), "reward is nan"),
        (make_step(behaviour_logprobs=np.array([0, np.nan], np.float32)), "not all finite"),
        (make_step(versions=()), "cover 0 tokens"),
    ],
)
def test_a_poisoned_record_is_refused_with_its_reason(server, ledger, actor, step, reason):
    actor.introduce()
    actor.deliver(1, step)
    refused = actor.receive()
    assert isinstance(refused, Refused)
    assert reason in refused.reason
    assert server.stats.malformed == 1
    assert ledger.committed == {}
    wait_until(lambda: len(ledger.losses) == 1, "its leases are free")
    assert reason in ledger.losses[0][1]


def test_garbage_is_refused_and_others_go_on(server, ledger, actor):
    actor.introduce()
    garbage = [[b""], [b"\xc1"], [b"\x80"], [b"x", b"y"], [b"\x91" * 9999], [b"a"] * 5000]
    with RawActor(server.address) as stranger:
        for frames in garbage:
            stranger.send_frames(frames)
            assert isinstance(stranger.receive(), Refused)
    assert server.stats.malformed == len(garbage)
    actor.deliver(1, make_step())
    assert actor.receive() == Ack(sequence=1)


def test_an_actor_that_sent_garbage_may_come_back(server, ledger, actor):
    actor.introduce()
    actor.deliver(1, make_step())
    assert actor.receive() == Ack(sequence=1)
    actor.send_frames([b"\xc1"])
    assert isinstance(actor.receive(), Refused)
    assert actor.introduce().last_sequence == 1
    actor.deliver(2, make_step(index=1))
    assert actor.receive() == Ack(sequence=2)


@pytest.fixture
def narrow_server(ledger):
    server = Server("tcp://127.0.0.1:0", ledger, limits=Limits(max_message_bytes=10_000))
    server.address = server.start()
    yield server
    server.close()


def test_an_oversized_frame_is_not_even_received(narrow_server, ledger):
    with RawActor(narrow_server.address) as actor, RawActor(narrow_server.address) as rogue:
        actor.introduce()
        rogue.introduce("rogue")
        rogue.send_frames([b"x", b"y" * 10_001])
        assert rogue.receive(0.2) is None  # its connection was cut
        actor.deliver(1, make_step())
        assert actor.receive() == Ack(sequence=1)
        rogue.send(Ready())
        assert isinstance(rogue.receive(), Reintroduce)  # on another one
    assert narrow_server.stats.malformed == 0


def test_a_message_of_many_small_frames_is_refused_as_too_large(narrow_server):
    with RawActor(narrow_server.address) as rogue:
        rogue.send_frames([b"x", *[b"y" * 4000] * 50])
        answer = rogue.receive()
    assert isinstance(answer, Refused)
    assert "at most 10000 are allowed" in answer.reason


def test_a_stranger_is_asked_for_its_hello(server, ledger, actor):
    actor.deliver(1, make_step())
    assert isinstance(actor.receive(), Reintroduce)
    assert ledger.committed == {}
    actor.introduce()
    actor.deliver(1, make_step())
    assert actor.receive() == Ack(sequence=1)


def test_a_strangers_goodbye_is_not_answered(server, ledger, actor):
    actor.send(Goodbye(reason="done"))
    wait_until(lambda: server.stats.strangers == 1, "it has arrived")
    assert actor.receive(0.1) is None


def test_control_messages_reach_the_handler_with_their_sender(server, ledger, actor):
    actor.introduce()
    actor.send(Ready(weights_version=3))
    actor.send(ActorHeartbeat(running=2))
    wait_until(lambda: len(ledger.controls) == 2, "both are there")
    assert ledger.controls == [
        ("actor-1", Ready(weights_version=3)),
        ("actor-1", ActorHeartbeat(running=2)),
    ]


def test_a_goodbye_is_a_loss_with_its_reason(server, ledger, actor):
    actor.introduce()
    actor.send(Goodbye(reason="drained"))
    wait_until(lambda: ledger.losses == [("actor-1", "drained")], "it is told")


def test_messages_go_out_in_order_from_any_thread(server, ledger, actor):
    actor.introduce()

    def send():
        for number in range(50):
            server.send("actor-1", Ack(sequence=number))

    thread = threading.Thread(target=send)
    thread.start()
    assert [actor.receive().sequence for _ in range(50)] == list(range(50))
    thread.join()


def test_a_message_to_nobody_is_counted(server):
    server.send("nobody", Grant(leases=()))
    wait_until(lambda: server.stats.undeliverable == 1, "it is counted")


def test_heartbeats_carry_version_and_pause(server, ledger, actor):
    server.announce(5, paused="evaluating")
    actor.introduce()
    beat = actor.receive(heartbeats=True)
    assert beat == LearnerHeartbeat(policy_version=5, paused="evaluating")


def test_a_silent_actor_is_lost_and_may_come_back(server, ledger, actor):
    ledger.dead_after_s = 0.3
    actor.introduce()
    wait_until(lambda: len(ledger.losses) == 1, "the silence is noticed")
    assert ledger.losses[0][0] == "actor-1"
    assert "nothing was heard from it" in ledger.losses[0][1]
    actor.send(ActorHeartbeat())
    assert isinstance(actor.receive(), Reintroduce)
    ledger.dead_after_s = 10.0
    actor.introduce()


def test_heartbeats_keep_an_actor_alive(server, ledger, actor):
    ledger.dead_after_s = 1.5
    actor.introduce()
    for _ in range(20):
        actor.receive(0.1)
        actor.send(ActorHeartbeat())
    assert ledger.losses == []


def test_a_learner_that_hung_does_not_take_its_own_silence_for_the_actors(server, ledger, actor):
    ledger.dead_after_s = 0.5
    actor.introduce()
    hung = threading.Event()

    def tick():
        if not hung.is_set():
            time.sleep(1.5)
            hung.set()

    ledger.tick = tick
    assert hung.wait(10)
    actor.send(ActorHeartbeat())
    wait_until(lambda: ledger.controls != [], "it is heard")
    assert ledger.losses == []


def test_deliveries_of_several_actors_share_a_commit_and_each_gets_its_own_ack(server, ledger):
    with RawActor(server.address) as one, RawActor(server.address) as two:
        one.introduce("one")
        two.introduce("two")
        one.deliver(1, make_step("a.0"))
        assert one.receive() == Ack(sequence=1)
        ledger.gate.clear()
        one.deliver(2, make_step("a.0", 1))
        wait_until(lambda: ledger.entered == 2, "it is being committed")
        one.deliver(3, make_step("a.0", 2))
        two.deliver(1, make_step("b.0"))
        wait_until(lambda: server.stats.deliveries == 4, "all have arrived")
        ledger.gate.set()
        assert [one.receive().sequence, one.receive().sequence] == [2, 3]
        assert two.receive() == Ack(sequence=1)
    assert ledger.groups == [1, 1, 2]


def test_a_new_connection_replaces_the_old_one(server, ledger, actor):
    actor.introduce()
    with RawActor(server.address) as again:
        again.introduce("actor-1")
        server.send("actor-1", Drain(reason="now"))
        assert again.receive() == Drain(reason="now")
        actor.send(ActorHeartbeat())
        assert isinstance(actor.receive(), Reintroduce)
    assert ledger.losses == []


def test_one_connection_is_one_actor(server, ledger, actor):
    actor.introduce("actor-1")
    actor.send(make_hello("actor-2"))
    assert "this connection is actor-1's, not actor-2's" in actor.receive().reason


def test_an_actor_that_does_not_read_is_lost_and_does_not_block_the_rest(server, ledger, actor):
    """Its own queue is bounded, and so is libzmq's: nobody else waits for it."""
    actor.introduce("stuck")
    message = Drain(reason="x" * 60_000)
    for _ in range(MAX_OUTGOING + 2000):
        server.send("stuck", message)
    wait_until(lambda: len(ledger.losses) == 1, "it is given up")
    assert ledger.losses[0] == ("stuck", f"it does not read: {MAX_OUTGOING} messages wait for it")
    with RawActor(server.address) as other:
        other.introduce("other")
        other.deliver(1, make_step())
        assert other.receive() == Ack(sequence=1)


def test_a_full_disk_pauses_and_then_goes_on(server, ledger, actor):
    ledger.commit_error = StorageFullError("no room for the run file: free some space")
    actor.introduce()
    actor.deliver(1, make_step())
    actor.deliver(2, make_step(index=1))
    beat = LearnerHeartbeat()
    while not beat.paused:
        beat = actor.receive(heartbeats=True)
        assert not isinstance(beat, Ack)
    assert beat.paused == "no room for the run file: free some space"
    ledger.commit_error = None
    acks = [actor.receive().sequence]
    if acks != [2]:
        acks.append(actor.receive().sequence)
    assert acks in ([2], [1, 2])
    while beat.paused:
        beat = actor.receive(heartbeats=True)
    assert ledger.doubled == []


def test_closing_with_a_full_disk_does_not_hang_and_acks_nothing(server, ledger, actor):
    ledger.commit_error = StorageFullError("no room")
    actor.introduce()
    actor.deliver(1, make_step())
    beat = LearnerHeartbeat()
    while not beat.paused:
        beat = actor.receive(heartbeats=True)
    server.close(timeout_s=0.2)
    assert actor.receive(0.1) is None


def test_a_failed_commit_ends_the_server_with_its_error(ledger):
    failures = []
    server = Server("tcp://127.0.0.1:0", ledger, on_failure=failures.append)
    ledger.commit_error = RuntimeError("the database is locked")
    with RawActor(server.start()) as actor:
        actor.introduce()
        actor.deliver(1, make_step())
        wait_until(lambda: failures != [], "the owner hears of it")
        assert actor.receive(0.1) is None
    assert server.failure is failures[0] is ledger.commit_error
    with pytest.raises(RuntimeError, match="the database is locked"):
        server.close()


@pytest.mark.parametrize("method", ["hello", "control", "lost", "tick"])
def test_an_error_of_any_callback_ends_the_server_with_it(method):
    class Broken(Ledger):
        pass

    def fail(self, *_):
        raise KeyError(method)

    setattr(Broken, method, fail)
    server = Server("tcp://127.0.0.1:0", Broken())
    with RawActor(server.start()) as actor:
        actor.send(make_hello())
        actor.send(Ready())
        actor.send(Goodbye(reason="x"))
        wait_until(lambda: server.failure is not None, "it fails")
    with pytest.raises(KeyError, match=method):
        server.close()


def test_a_handler_may_refuse_a_control_message(server, ledger, actor):
    def control(actor_id, message):
        raise ProtocolError("there is no epoch 9")

    ledger.control = control
    actor.introduce()
    actor.send(Ready())
    assert actor.receive() == Refused(reason="there is no epoch 9")


def test_closing_commits_and_acks_what_came_in(server, ledger, actor):
    actor.introduce()
    ledger.gate.clear()
    actor.deliver(1, make_step())
    wait_until(lambda: server.stats.deliveries == 1, "it has arrived")
    closing = threading.Thread(target=server.close)
    closing.start()
    ledger.gate.set()
    closing.join(10)
    assert not closing.is_alive()
    assert actor.receive() == Ack(sequence=1)


def test_an_address_in_use_is_named(server, ledger):
    with pytest.raises(CapoError, match=f"cannot listen on {server.address}: Address already in"):
        Server(server.address, ledger).start()


def test_an_open_address_needs_keys(ledger):
    with pytest.raises(ConfigError, match="there are no keys"):
        Server("tcp://0.0.0.0:0", ledger)


def test_sending_and_closing_are_harmless_before_start_and_after_close(ledger):
    server = Server("tcp://127.0.0.1:0", ledger)
    server.send("actor-1", Ack(sequence=1))
    server.close()
    server.start()
    server.close()
    server.send("actor-1", Ack(sequence=1))
    server.close()


def test_a_torn_multipart_message_leaves_nothing_behind(server, ledger, actor):
    actor.introduce()
    with RawActor(server.address) as rogue:
        header, *arrays = encode(Delivery(sequence=1, steps=(make_step(),)))
        rogue.socket.send(header, zmq.SNDMORE)
        rogue.socket.send(arrays[0], zmq.SNDMORE)
    actor.deliver(1, make_step())
    assert actor.receive() == Ack(sequence=1)
    assert server.stats.malformed == 0


def test_a_welcome_comes_first_even_when_the_handler_sends_from_hello(server, ledger, actor):
    answer = ledger.hello

    def hello(message):
        server.send(message.actor_id, Grant(leases=()))
        return answer(message)

    ledger.hello = hello
    actor.send(make_hello())
    assert isinstance(actor.receive(), Welcome)
    assert actor.receive() == Grant(leases=())


def test_before_the_start_there_is_no_loop_and_no_trouble(ledger):
    server = Server("tcp://127.0.0.1:0", ledger)
    with pytest.raises(ValueError, match="has not been started"):
        _ = server.loop
    assert (server.storage_trouble, server.commit_s) == ("", 0.0)
