"""Which leases are played, in which order, and how many at once."""

import asyncio

from capo.actors.episodes import REMEMBERED_LEASES, Episodes
from capo.protocol.records import Lease
from tests.actors.worker_world import lease


class Table:
    """Plays nothing until `release`; notes what was begun, finished and cancelled."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.finished: list[str] = []
        self.cancelled: list[str] = []
        self.num_ended = 0
        self.release = asyncio.Event()
        self.episodes = Episodes(self.play, self.on_ended)

    async def play(self, one: Lease) -> None:
        self.begun.append(one.episode_id)
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.append(one.episode_id)
            raise
        self.finished.append(one.episode_id)

    def on_ended(self) -> None:
        self.num_ended += 1


def test_leases_are_played_in_order_and_no_more_than_allowed_at_once() -> None:
    async def scenario() -> None:
        table = Table()
        async with asyncio.TaskGroup() as tasks:
            table.episodes.take([lease(0), lease(1), lease(2)])
            table.episodes.start(tasks, at_most=2)
            await table.episodes.settle(0.01)
            assert table.begun == ["l0.0", "l1.0"]
            assert table.episodes.ids == ("l0.0", "l1.0", "l2.0")
            table.release.set()
            await table.episodes.settle(5.0)
            assert table.episodes.num_playing == 0
            assert table.num_ended == 2
            table.episodes.start(tasks, at_most=2)
        assert table.finished == ["l0.0", "l1.0", "l2.0"]
        await table.episodes.settle(5.0)  # nothing is in play: at once

    asyncio.run(scenario())


def test_an_attempt_is_played_once_however_often_it_is_granted() -> None:
    async def scenario() -> None:
        table = Table()
        table.release.set()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                table.episodes.take([lease(0), lease(0)])
                table.episodes.start(tasks, at_most=9)
                await table.episodes.settle(5.0)
        assert table.begun == ["l0.0"]

    asyncio.run(scenario())


def test_what_is_remembered_of_grants_is_bounded() -> None:
    async def scenario() -> None:
        episodes = Table().episodes
        for number in range(REMEMBERED_LEASES + 5):
            episodes.take([lease(number)])
        episodes.start_no_more()
        episodes.take([lease(0), lease(REMEMBERED_LEASES + 4)])
        assert episodes.ids == ("l0.0",)  # the oldest is forgotten, the newest is not

    asyncio.run(scenario())


def test_a_revoked_lease_is_not_started_and_one_in_play_is_cancelled() -> None:
    async def scenario() -> None:
        table = Table()
        async with asyncio.TaskGroup() as tasks:
            table.episodes.take([lease(number) for number in range(4)])
            table.episodes.start(tasks, at_most=2)
            await asyncio.sleep(0)
            table.episodes.revoke(["l1.0", "l3.0", "l9.0"])
            await asyncio.sleep(0)
            table.release.set()
            await table.episodes.settle(5.0)
            table.episodes.start(tasks, at_most=2)
        assert table.finished == ["l0.0", "l2.0"]
        assert table.cancelled == ["l1.0"]
        assert table.num_ended == 3

    asyncio.run(scenario())


def test_aborting_cancels_what_is_in_play() -> None:
    async def scenario() -> None:
        table = Table()
        async with asyncio.TaskGroup() as tasks:
            table.episodes.take([lease(0), lease(1)])
            table.episodes.start(tasks, at_most=1)
            await asyncio.sleep(0)
            table.episodes.start_no_more()
            table.episodes.abort()
        assert table.cancelled == ["l0.0"]
        assert table.episodes.ids == ()

    asyncio.run(scenario())
