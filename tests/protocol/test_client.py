"""What a worker may ask of the client, against the real server on loopback."""

import asyncio

import numpy as np
import pytest
import uvloop

from capo.protocol.client import ActorClient
from capo.protocol.conversation import MAX_CONTROLS
from capo.protocol.errors import CapoError, PeerLostError, ProtocolError, RefusedError
from capo.protocol.messages import (
    ActorHeartbeat,
    Delivery,
    Drain,
    Goodbye,
    Grant,
    Ready,
    Refused,
    Welcome,
)
from tests.protocol.clients import free_address, make_client, run, until
from tests.protocol.wire import LIMIT_S, make_end, make_hello, make_step, wait_until


def test_delivered_records_are_committed_when_flush_returns(server, ledger):
    async def main():
        async with make_client(server.address) as client:
            await client.deliver([make_step(length=3)], [make_end()])
            await client.flush(LIMIT_S)
        assert ledger.ends["lease.0"].outcome == 1.0
        action = ledger.committed[("lease.0", 0)].action
        np.testing.assert_array_equal(action, np.arange(3, dtype=np.int32))

    run(main())


def test_the_client_runs_on_uvloop(server, ledger):
    async def main():
        async with make_client(server.address) as client:
            for index in range(100):
                await client.deliver([make_step(index=index)])
            await client.flush(LIMIT_S)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert ledger.order == [("lease.0", index) for index in range(100)]


def test_the_worker_sees_what_the_learner_says_but_not_the_pulse(server, ledger):
    async def main():
        async with make_client(server.address) as client:
            messages = client.messages()
            assert isinstance(await anext(messages), Welcome)
            server.announce(3)
            await until(lambda: client.policy_version == 3, "a heartbeat has come")
            server.send("actor-1", Grant(leases=()))
            server.send("actor-1", Drain(reason="end"))
            assert await anext(messages) == Grant(leases=())
            assert await anext(messages) == Drain(reason="end")

    run(main())


def test_control_messages_and_heartbeats_reach_the_learner(server, ledger):
    async def main():
        heartbeat = ActorHeartbeat(running=3, waiting_for="env")
        async with make_client(server.address, make_heartbeat=lambda: heartbeat) as client:
            await client.send(Ready(weights_version=2))
            await until(lambda: len(ledger.controls) >= 3, "heartbeats have come")
        assert ledger.controls[0] == ("actor-1", Ready(weights_version=2))
        assert all(control == ("actor-1", heartbeat) for control in ledger.controls[1:])

    run(main())


def test_what_the_client_sends_itself_cannot_be_sent_by_hand(server):
    async def main():
        async with make_client(server.address) as client:
            with pytest.raises(ValueError, match="Delivery is sent by the client itself"):
                await client.send(Delivery(sequence=1))
            with pytest.raises(ValueError, match="Hello is sent by the client itself"):
                await client.send(make_hello())

    run(main())


def test_a_refusal_is_raised_everywhere(server, ledger):
    ledger.answer = Refused(reason="your tokenizer is another: start the actor again")

    async def main():
        async with make_client(server.address) as client:
            waiting = asyncio.create_task(client.deliver([make_step()]))
            with pytest.raises(RefusedError, match="your tokenizer is another"):
                await anext(client.messages())
            with pytest.raises(RefusedError, match="your tokenizer is another"):
                await waiting
            with pytest.raises(RefusedError, match=f"the learner at {server.address} refused"):
                await client.deliver([make_step()])
            with pytest.raises(RefusedError):
                await client.send(Ready())
            with pytest.raises(RefusedError):
                await client.flush(1.0)

    run(main())


def test_an_older_actor_is_told_to_upgrade(server):
    async def main():
        client = ActorClient(server.address, lambda: make_hello(protocol_version=0))
        async with client:
            with pytest.raises(RefusedError, match="upgrade capo-rl on the actor's machine"):
                await anext(client.messages())

    run(main())


def test_a_poisoned_record_is_refused_before_it_travels(server, ledger):
    async def main():
        async with make_client(server.address) as client:
            with pytest.raises(ProtocolError, match="reward is nan"):
                await client.deliver([make_step(reward=float("nan"))])
            await client.deliver([make_step()])
            await client.flush(LIMIT_S)
        assert ledger.order == [("lease.0", 0)]

    run(main())


def test_a_full_window_blocks_deliver_until_the_learner_commits(server, ledger):
    ledger.window = 3
    ledger.gate.clear()

    async def main():
        async with make_client(server.address, resend_after_s=60.0) as client:
            for index in range(3):
                await client.deliver([make_step(index=index)])
            blocked = [
                asyncio.create_task(client.deliver([make_step(index=index)]))
                for index in range(3, 9)
            ]
            await asyncio.sleep(0.3)
            assert not any(task.done() for task in blocked)
            ledger.gate.set()
            await asyncio.gather(*blocked)
            await client.flush(LIMIT_S)
        assert ledger.order == [("lease.0", index) for index in range(9)]
        assert sum(ledger.groups) < 9  # what waited went out together

    run(main())


def test_a_cancelled_deliver_that_waited_delivers_nothing(server, ledger):
    ledger.window = 1
    ledger.gate.clear()

    async def main():
        async with make_client(server.address) as client:
            await client.deliver([make_step(index=0)])
            waiting = asyncio.create_task(client.deliver([make_step(index=1)]))
            await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            ledger.gate.set()
            await client.deliver([make_step(index=2)])
            await client.flush(LIMIT_S)
        assert ledger.order == [("lease.0", 0), ("lease.0", 2)]

    run(main())


def test_flush_does_not_wait_for_what_was_cancelled(server, ledger):
    ledger.window = 1
    ledger.gate.clear()

    async def main():
        async with make_client(server.address) as client:
            await client.deliver([make_step(index=0)])
            waiting = asyncio.create_task(client.deliver([make_step(index=1)]))
            await asyncio.sleep(0.05)
            flushing = asyncio.create_task(client.flush(LIMIT_S))
            ledger.gate.set()
            waiting.cancel()
            await flushing

    run(main())


def test_a_worker_that_cannot_say_hello_leaves_nothing_open(server):
    def make_hello():
        raise KeyError("tokenizer")

    async def main():
        with pytest.raises(KeyError, match="tokenizer"):
            async with ActorClient(server.address, make_hello):
                pass

    run(main())


def test_control_messages_that_wait_are_bounded():
    async def main():
        async with make_client(free_address()) as client:
            for _ in range(MAX_CONTROLS):
                await client.send(Ready())
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await client.send(Ready())

    run(main())


def test_flush_names_whom_it_waited_for():
    address = free_address()

    async def main():
        async with make_client(address) as client:
            waiting = asyncio.create_task(client.deliver([make_step()]))
            await asyncio.sleep(0.01)
            with pytest.raises(PeerLostError, match=f"learner at {address} did not ack 1 deliver"):
                await client.flush(0.2)
            waiting.cancel()

    run(main())


def test_an_address_that_cannot_be_one_is_named():
    async def main():
        with pytest.raises(CapoError, match=r"cannot connect to 'nonsense'.*tcp://host:port"):
            async with make_client("nonsense"):
                pass

    run(main())


def test_goodbye_is_the_last_word(server, ledger):
    async def main():
        async with make_client(server.address) as client:
            await anext(client.messages())
            await client.send(Goodbye(reason="drained"))
            await until(lambda: ledger.losses == [("actor-1", "drained")], "it is heard")
            await asyncio.sleep(0.3)
        assert len(ledger.hellos) == 1
        assert server.stats.strangers == 0

    run(main())


def test_goodbye_leaves_even_when_the_client_closes_at_once(server, ledger):
    async def main():
        async with make_client(server.address) as client:
            await anext(client.messages())
            await client.send(Goodbye(reason="drained"))

    run(main())
    wait_until(lambda: ledger.losses == [("actor-1", "drained")], "it is heard")


def test_closing_ends_messages_and_refuses_further_deliveries(server):
    async def main():
        async with make_client(server.address) as client:
            messages = client.messages()
            await anext(messages)
        with pytest.raises(StopAsyncIteration):
            await anext(messages)
        with pytest.raises(CapoError, match="was closed"):
            await client.deliver([make_step()])

    run(main())


def test_an_error_in_the_body_comes_out_as_it_is(server):
    async def main():
        with pytest.raises(KeyError, match="mine"):
            async with make_client(server.address):
                raise KeyError("mine")

    run(main())
