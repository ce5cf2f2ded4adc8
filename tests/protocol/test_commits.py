"""Group commit with a writer that the test holds and releases."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from capo.protocol.commits import MAX_GROUP, GroupCommit
from capo.protocol.errors import StorageFullError
from capo.protocol.messages import Delivery
from tests.protocol.wire import LIMIT_S


class Writer:
    """Keeps the sequences of every transaction, and of what was told to be durable."""

    def __init__(self) -> None:
        self.written: list[list[int]] = []
        self.durable: list[int] = []
        self.left: list[int] = []  # bytes that were pending after each commit
        self.tries = 0
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def commit(self, deliveries) -> None:
        self.tries += 1
        assert self.gate.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        self.written.append([delivery.sequence for _, delivery in deliveries])

    def committed(self, deliveries) -> None:
        self.durable += [delivery.sequence for _, delivery in deliveries]
        assert self.durable == [sequence for group in self.written for sequence in group]


def with_commits(scenario) -> None:
    """Run `scenario(commits, writer)` while commits are made."""

    async def main() -> None:
        writer = Writer()

        def committed(deliveries) -> None:
            writer.committed(deliveries)
            writer.left.append(commits.pending_bytes)

        with ThreadPoolExecutor(1) as pool:
            commits = GroupCommit(writer.commit, committed, pool)
            running = asyncio.create_task(commits.run())
            try:
                async with asyncio.timeout(LIMIT_S):
                    await scenario(commits, writer)
            finally:
                writer.gate.set()
                running.cancel()

    asyncio.run(main())


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def add(commits: GroupCommit, *sequences: int) -> None:
    for sequence in sequences:
        commits.add("actor-1", Delivery(sequence=sequence), num_bytes=10 + sequence)


def test_what_arrives_during_a_commit_goes_into_the_next_one_together() -> None:
    async def scenario(commits: GroupCommit, writer: Writer) -> None:
        assert await commits.drain(0)
        writer.gate.clear()
        add(commits, 1)
        await until(lambda: writer.tries == 1)
        assert commits.begun_at is not None
        add(commits, 2, 3)
        assert commits.pending_bytes == 11 + 12 + 13
        assert writer.durable == []
        writer.gate.set()
        assert await commits.drain(LIMIT_S)
        assert writer.written == [[1], [2, 3]]
        assert writer.durable == [1, 2, 3]
        assert writer.left == [12 + 13, 0]
        assert commits.begun_at is None

    with_commits(scenario)


def test_a_transaction_has_a_largest_number_of_deliveries() -> None:
    async def scenario(commits: GroupCommit, writer: Writer) -> None:
        add(commits, *range(1, MAX_GROUP + 3))
        assert await commits.drain(LIMIT_S)
        assert [len(group) for group in writer.written] == [MAX_GROUP, 2]
        assert writer.durable == list(range(1, MAX_GROUP + 3))

    with_commits(scenario)


def test_a_full_disk_keeps_the_deliveries_and_says_why_until_there_is_room() -> None:
    async def scenario(commits: GroupCommit, writer: Writer) -> None:
        writer.error = StorageFullError("no room")
        add(commits, 1)
        await until(lambda: commits.paused == "no room")
        add(commits, 2)
        assert not await commits.drain(LIMIT_S)  # at once: nobody knows when there is room
        assert commits.pending_bytes == 11 + 12
        assert writer.durable == []
        writer.error = None
        await until(lambda: writer.durable == [1, 2])
        assert writer.written == [[1], [2]]
        assert commits.paused == ""
        assert commits.pending_bytes == 0

    with_commits(scenario)


def test_draining_ends_when_a_commit_takes_too_long() -> None:
    async def scenario(commits: GroupCommit, writer: Writer) -> None:
        writer.gate.clear()
        add(commits, 1)
        assert not await commits.drain(0.05)
        writer.gate.set()
        assert await commits.drain(LIMIT_S)

    with_commits(scenario)


def test_any_other_error_of_the_writer_ends_it() -> None:
    async def main() -> None:
        writer = Writer()
        writer.error = ZeroDivisionError("a bug")
        with ThreadPoolExecutor(1) as pool:
            commits = GroupCommit(writer.commit, writer.committed, pool)
            add(commits, 1)
            with pytest.raises(ZeroDivisionError, match="a bug"):
                await asyncio.wait_for(commits.run(), LIMIT_S)
        assert writer.durable == []

    asyncio.run(main())
