"""One socket on the loop: nothing is missed, nothing blocks, no message takes all the memory."""

import asyncio
from collections.abc import Iterator

import pytest
import zmq

from capo.protocol.frames import Limits
from capo.protocol.sockets import BURST, Pump
from tests.protocol.clients import run


class Owner:
    """Keeps what a pump hands on; `error` is raised instead, once."""

    def __init__(self) -> None:
        self.messages: list[list[bytes]] = []
        self.ready = 0
        self.failures: list[Exception] = []
        self.error: Exception | None = None

    def pump(self, socket: zmq.Socket, limits: Limits | None = None) -> Pump:
        return Pump(socket, limits or Limits(), self.take, self.on_ready, self.failures.append)

    def take(self, parts: list[bytes]) -> None:
        self.messages.append(parts)
        if self.error is not None:
            raise self.error

    def on_ready(self) -> None:
        self.ready += 1


@pytest.fixture
def pair() -> Iterator[tuple[zmq.Socket, zmq.Socket]]:
    """Two sockets that are connected; a pump takes and closes the first."""
    with zmq.Context() as context:
        ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        for socket in (ours, theirs):
            socket.setsockopt(zmq.SNDHWM, 8)
            socket.setsockopt(zmq.RCVHWM, 2 * BURST)
        ours.bind("inproc://pair")
        theirs.connect("inproc://pair")
        yield ours, theirs
        ours.close(linger=0)
        theirs.close(linger=0)


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_messages_are_read_in_order_also_more_than_one_burst(pair) -> None:
    async def main() -> None:
        ours, theirs = pair
        for number in range(2 * BURST):
            theirs.send_multipart([b"%d" % number, b"rest"])
        owner = Owner()
        pump = owner.pump(ours)
        await until(lambda: len(owner.messages) == 2 * BURST)
        assert owner.messages == [[b"%d" % number, b"rest"] for number in range(2 * BURST)]
        theirs.send(b"later")
        await until(lambda: owner.messages[-1] == [b"later"])
        pump.close()

    run(main())


@pytest.mark.parametrize(
    ("limits", "num_sent", "num_kept"),
    [
        (Limits(max_message_bytes=250), 9, 4),  # the first part, a routing id, is not counted
        (Limits(max_message_bytes=800), 9, 9),
        (Limits(max_frames=4), 9, 6),
    ],
    ids=["bytes", "just as many bytes", "frames"],
)
def test_a_message_is_cut_off_where_it_exceeds_the_limits(pair, limits, num_sent, num_kept) -> None:
    async def main() -> None:
        ours, theirs = pair
        theirs.send_multipart([b"x" * 100] * num_sent)
        theirs.send(b"next")
        owner = Owner()
        pump = owner.pump(ours, limits)
        await until(lambda: len(owner.messages) == 2)
        assert owner.messages == [[b"x" * 100] * num_kept, [b"next"]]
        pump.close()

    run(main())


def test_an_exception_of_a_callback_goes_to_the_owner_and_nothing_more_is_read(pair) -> None:
    async def main() -> None:
        ours, theirs = pair
        theirs.send(b"first")
        theirs.send(b"second")
        owner = Owner()
        owner.error = ZeroDivisionError()
        pump = owner.pump(ours)
        await until(lambda: owner.failures)
        theirs.send(b"third")
        await asyncio.sleep(0.05)
        assert owner.failures == [owner.error]
        assert owner.messages == [[b"first"]]
        pump.close()

    run(main())


def test_what_cannot_go_out_now_is_refused_and_the_owner_is_told_when_it_may_go_on(pair) -> None:
    async def main() -> None:
        ours, theirs = pair
        theirs.setsockopt(zmq.RCVHWM, 8)
        owner = Owner()
        pump = owner.pump(ours)
        sent = 0
        while pump.send([b"%d" % sent]):
            sent += 1
        assert sent > 0
        await asyncio.sleep(0.05)
        before = owner.ready
        for number in range(sent):
            assert await asyncio.to_thread(theirs.recv) == b"%d" % number
        await until(lambda: owner.ready > before)
        assert pump.send([b"again"])
        pump.close()

    run(main())


def test_without_a_message_there_is_no_sender(pair) -> None:
    async def main() -> None:
        pump = Owner().pump(pair[0])
        with pytest.raises(ValueError, match="no message yet"):
            _ = pump.user_id
        pump.close()

    run(main())
