"""What an actor has to deliver and what became of it. Pure state: knows no socket and no clock.

Records wait until the window has room, then many go out as one Delivery, in order. A Delivery is
kept until it is acked; `rewind` makes all of them due again, so that the order is kept (go-back-N).
"""

import asyncio
from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from capo.protocol.errors import ProtocolError
from capo.protocol.frames import MIB, Frame, Limits, check_size, encode
from capo.protocol.messages import Delivery, Welcome
from capo.protocol.records import EpisodeEnd, Step

MAX_BATCH_RECORDS = 128
MAX_BATCH_BYTES = MIB


class Parcel(Struct, eq=False):
    """The records of one call, which stay together. `packed` is done when they have a sequence."""

    steps: tuple[Step, ...]
    ends: tuple[EpisodeEnd, ...]
    num_bytes: int
    packed: asyncio.Future[None]

    @property
    def num_records(self) -> int:
        return len(self.steps) + len(self.ends)


class Packed(Struct, frozen=True, eq=False):
    """One delivery with its sequence, ready to be sent as often as needed."""

    frames: list[Frame]
    ended: tuple[str, ...]  # the episodes whose end is in it


class Outbox:
    """`limits` are the learner's for one message, as far as they are known."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.window = 0  # until the first Welcome nothing can be numbered
        self.sequence = 0  # of the last Delivery that was made
        self.acked = 0
        self._waiting: deque[Parcel] = deque()
        self._unacked: deque[Packed] = deque()  # sequences acked + 1 .. sequence
        self._num_sent = 0  # of the unacked, since the last rewind

    @property
    def empty(self) -> bool:
        return not self._waiting and not self._unacked

    @property
    def num_unacked(self) -> int:
        return len(self._unacked)

    @property
    def unacked_ends(self) -> tuple[str, ...]:
        """Episodes that are over here and not yet known to be over at the learner's."""
        return tuple(episode_id for packed in self._unacked for episode_id in packed.ended)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def put(self, parcel: Parcel) -> None:
        self._waiting.append(parcel)

    def withdraw(self, parcel: Parcel) -> None:
        """Take back what nobody waits for any longer, unless it has a sequence already."""
        if parcel in self._waiting:
            self._waiting.remove(parcel)

    def pack(self) -> None:
        """Make deliveries of what waits, as far as the window has room."""
        while self._waiting and len(self._unacked) < self.window:
            batch = [self._waiting.popleft()]
            records, size = batch[0].num_records, batch[0].num_bytes
            while self._waiting:
                records += self._waiting[0].num_records
                size += self._waiting[0].num_bytes
                if records > MAX_BATCH_RECORDS or size > MAX_BATCH_BYTES:
                    break
                batch.append(self._waiting.popleft())
            self._make(batch)

    def due(self) -> list[Frame] | None:
        """The next Delivery to send, if any; `sent` says that it was."""
        if self._num_sent == len(self._unacked):
            return None
        return self._unacked[self._num_sent].frames

    def sent(self) -> None:
        self._num_sent += 1

    def rewind(self) -> None:
        self._num_sent = 0

    def welcome(self, welcome: Welcome) -> None:
        """A connection was made: everything after the learner's last one is due again.

        Raises ProtocolError if what the learner has contradicts what it acked or what was sent.
        """
        last = welcome.last_sequence
        if last < self.acked:
            raise ProtocolError(
                f"the learner acked deliveries up to {self.acked} but now knows only {last}: its "
                "run file was replaced or lost its end; restart this actor"
            )
        if last > self.sequence:
            raise ProtocolError(
                f"the learner has {last} deliveries of this actor, which sent only {self.sequence}"
                ": two actors use the same actor_id; restart this one"
            )
        self.window = welcome.window
        self.limits = Limits(
            max_frames=self.limits.max_frames,
            max_header_bytes=self.limits.max_header_bytes,
            max_message_bytes=min(self.limits.max_message_bytes, welcome.max_message_bytes),
        )
        self.ack(last)
        self.rewind()

    def ack(self, sequence: int) -> bool:
        """Forget what is durable now; whether that was news."""
        if sequence > self.sequence:
            raise ProtocolError(
                f"the learner acked delivery {sequence}, but only {self.sequence} were sent"
            )
        num_acked = sequence - self.acked
        if num_acked <= 0:
            return False
        for _ in range(num_acked):
            self._unacked.popleft()
        self.acked = sequence
        self._num_sent = max(0, self._num_sent - num_acked)
        return True

    def fail(self, error: BaseException) -> None:
        """Nothing more will be delivered: tell everyone who waits."""
        for parcel in self._waiting:
            if not parcel.packed.done():
                parcel.packed.set_exception(error)
        self._waiting.clear()

    def _make(self, batch: Sequence[Parcel]) -> None:
        delivery = Delivery(
            sequence=self.sequence + 1,
            steps=tuple(step for parcel in batch for step in parcel.steps),
            ends=tuple(end for parcel in batch for end in parcel.ends),
        )
        frames = encode(delivery)
        try:
            check_size(frames, self.limits)
        except ProtocolError as error:  # one parcel: a batch of several is far below any limit
            for parcel in batch:
                if not parcel.packed.done():
                    parcel.packed.set_exception(error)
            return
        self.sequence += 1
        self._unacked.append(Packed(frames, tuple(end.episode_id for end in delivery.ends)))
        for parcel in batch:
            if not parcel.packed.done():
                parcel.packed.set_result(None)


def size_of_records(steps: Sequence[Step], ends: Sequence[EpisodeEnd]) -> int:
    """About how many bytes these take on the wire; never much less."""
    size = 0
    for step in steps:
        num_tokens = step.observation.size + 2 * step.action.size
        if step.entropies is not None:
            num_tokens += step.entropies.size
        texts = len(step.episode_id) + len(step.state_key)
        size += 4 * num_tokens + 256 + 4 * texts + 16 * len(step.versions)
        size += sum(4 * len(key) + 16 for key in step.info)
    for end in ends:
        num_tokens = 0 if end.final_observation is None else end.final_observation.size
        size += 4 * num_tokens + 256 + 4 * (len(end.episode_id) + len(end.error))
        size += sum(4 * len(key) + 16 for key in end.metrics)
    return size
