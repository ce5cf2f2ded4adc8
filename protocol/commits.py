"""Group commit: whatever arrives while the writer writes goes into its next transaction together.

Knows no actor's state and no socket; says through `committed` what is durable, in order.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct

from capo.protocol.errors import StorageFullError
from capo.protocol.messages import Delivery

FIRST_RETRY_S = 0.25
LAST_RETRY_S = 10.0
MAX_GROUP = 1024  # deliveries of one transaction

logger = logging.getLogger(__name__)

Deliveries = Sequence[tuple[str, Delivery]]


class _Waiting(Struct, frozen=True):
    actor_id: str
    delivery: Delivery
    num_bytes: int


class GroupCommit:
    """`add` from the loop; `commit` runs in the writer thread; `committed` runs on the loop.

    StorageFullError keeps the deliveries and tries again; any other exception of `commit` ends
    `run` with it. `paused` says why nothing is being committed.
    """

    def __init__(
        self,
        commit: Callable[[Deliveries], None],
        committed: Callable[[Deliveries], None],
        writer: ThreadPoolExecutor,
    ) -> None:
        self._commit = commit
        self._committed = committed
        self._writer = writer
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.pending_bytes = 0
        self.paused = ""
        self.begun_at: float | None = None  # by time.monotonic, of the commit that is under way

    def add(self, actor_id: str, delivery: Delivery, num_bytes: int) -> None:
        self._waiting.append(_Waiting(actor_id, delivery, num_bytes))
        self.pending_bytes += num_bytes
        self._arrived.set()
        self._idle.clear()

    async def run(self) -> None:
        """Commit until cancelled, or until `commit` raises what is not StorageFullError."""
        while True:
            await self._arrived.wait()
            group = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_GROUP))]
            deliveries = [(one.actor_id, one.delivery) for one in group]
            self.begun_at = time.monotonic()
            await self._write(deliveries)
            self.begun_at = None
            self.pending_bytes -= sum(one.num_bytes for one in group)
            if not self._waiting:
                self._arrived.clear()
                self._idle.set()
            self._committed(deliveries)

    async def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is pending; False when that takes too long or storage is full."""
        if self.paused:
            return False
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def _write(self, deliveries: Deliveries) -> None:
        loop = asyncio.get_running_loop()
        retry_s = FIRST_RETRY_S
        while True:
            try:
                await loop.run_in_executor(self._writer, self._commit, deliveries)
            except StorageFullError as error:
                if not self.paused:
                    logger.error("%s; %d deliveries wait for room", error, len(deliveries))
                self.paused = str(error) or "the disk of the run file is full"
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, LAST_RETRY_S)
            else:
                if self.paused:
                    logger.warning("there is room for the run file again")
                self.paused = ""
                return
