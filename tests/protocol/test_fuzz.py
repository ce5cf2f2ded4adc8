"""Broken messages by the hundred thousand: whatever comes in is a message or a refusal.

Most go through the decoder and the validation alone; fewer through real sockets, and as many there
in the slow form.
"""

import contextlib
import random
import re
import socket
import struct
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest

from capo.configs.schema import NetworkConfig, RolloutConfig
from capo.learner.run_file import RunFile
from capo.learner.scheduler import Scheduler
from capo.learner.scheduler_rules import SchedulerRules
from capo.learner.service import Service
from capo.protocol.errors import ProtocolError
from capo.protocol.frames import FrameDecoder, Limits, encode
from capo.protocol.handshake import version_refusal
from capo.protocol.messages import (
    Ack,
    ActorSetup,
    Delivery,
    Goodbye,
    Grant,
    Hello,
    Refused,
    ToLearner,
)
from capo.protocol.records import Step, Task
from capo.protocol.validate import check_control, check_delivery, check_hello
from tests.protocol.mutations import DRAWN, KINDS, Mutator
from tests.protocol.wire import RawActor, make_end, make_hello, make_step

NUM_IN_PROCESS = 120_000
NUM_OVER_SOCKETS = 4_000
NUM_OVER_SOCKETS_SLOW = 100_000
PER_CONNECTION = 50
MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# Decoder and validation, in process


def read(decoder: FrameDecoder, frames: list[bytes]):
    """As the server does."""
    message = decoder.decode(frames)
    if isinstance(message, Hello):
        reason = version_refusal(message.protocol_version)
        if reason:
            raise ProtocolError(reason)
        check_hello(message)
    elif isinstance(message, Delivery):
        check_delivery(message)
    else:
        check_control(message)
    return message


def check_trainable(step: Step) -> None:
    """What must hold of a step that got through, in other words than the validation's."""
    assert len(step.action) == len(step.behaviour_logprobs) == sum(s[1] for s in spans(step)) > 0
    assert not np.isnan(step.behaviour_logprobs).any()
    assert (step.action >= 0).all()
    assert (step.observation >= 0).all()
    assert abs(step.reward) < float("inf")
    assert step.entropies is None or len(step.entropies) == len(step.action)
    assert 0 < len(step.episode_id) <= 256


def spans(step: Step) -> list[tuple[int, int]]:
    assert all(span.num_tokens > 0 <= span.version for span in step.versions)
    return [(span.version, span.num_tokens) for span in step.versions]


def test_every_input_is_a_message_or_a_refusal_and_leaves_nothing_behind():
    mutator = Mutator(seed=0)
    decoder: FrameDecoder = FrameDecoder(ToLearner, Limits())
    taken, refused, reasons = Counter(), Counter(), Counter()
    before = 0
    for number in range(NUM_IN_PROCESS):
        if number == NUM_IN_PROCESS // 10:
            before = resident_bytes()
        kind = DRAWN[number % len(DRAWN)]
        frames = mutator.input(kind)
        try:
            message = read(decoder, frames)
        except ProtocolError as error:
            refused[kind] += 1
            reason = str(error)
            assert 0 < len(reason) < 2000
            reasons[re.sub(r"[^a-z_ ]+", "#", reason.split(" - at")[0])] += 1
            continue
        taken[kind] += 1
        again = [bytes(frame) for frame in encode(message)]
        assert encode(decoder.decode(again)) == encode(message)
        if isinstance(message, Delivery):
            for step in message.steps:
                check_trainable(step)
    assert resident_bytes() - before < 32 * MIB
    for kind in KINDS:  # neither all of it garbage nor all of it harmless
        assert taken[kind] > NUM_IN_PROCESS / len(DRAWN) / 50, kind
        assert refused[kind] > NUM_IN_PROCESS / len(DRAWN) / 4, kind
    assert len(reasons) > 100  # it went deeper than the first check


@pytest.mark.parametrize("kind", KINDS)
def test_a_huge_declared_size_allocates_nothing(kind):
    mutator = Mutator(seed=1)
    decoder: FrameDecoder = FrameDecoder(ToLearner, Limits())
    tracemalloc.start()
    try:
        for _ in range(300):
            frames = list(mutator.valid[kind])
            mutator.insert_huge(frames)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with contextlib.suppress(ProtocolError):
                read(decoder, frames)
            assert tracemalloc.get_traced_memory()[1] - before < 200_000
    finally:
        tracemalloc.stop()


# The real service over real sockets


class Rig:
    """A service with a real run file and scheduler, and one well-behaved actor."""

    def __init__(self, folder: Path) -> None:
        self.run_file = RunFile.create(folder, {"run_id": "run"})
        rules = SchedulerRules(seed=0, updates=9, batch_episodes=2)
        tasks = [Task(f"game-{number}", b"") for number in range(2)]
        self.scheduler = Scheduler.create(rules, tasks, self.run_file)
        self.service = Service(
            run_id="run",
            name="learner",
            run_dir=folder,
            setup=ActorSetup(
                environment="tests:none",
                environment_options=b"{}",
                rollout=msgspec.json.encode(RolloutConfig(concurrency=4)),
                model_config=b'{"vocab_size": 1000}',
                model_dtype="float32",
                max_length=64,
                tokenizer_files={},
                tokenizer_digest="digest",
                seed=0,
            ),
            network=NetworkConfig(heartbeat_s=0.2, dead_after_s=60.0),
            run_file=self.run_file,
            scheduler=self.scheduler,
            note=lambda sentence: None,
        )
        self.address = self.service.start()

    @property
    def stats(self):
        return self.service._server.stats

    def close(self) -> None:
        self.service.close()
        self.run_file.close()


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path / "run")
    yield rig
    rig.close()


class GoodActor(RawActor):
    """Plays its lease step by step; every step has to be acked before the next."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.send(make_hello("good", capacity=1, weights_version=0))
        self.receive()
        grant = self.receive()
        assert isinstance(grant, Grant)
        self.episode_id = grant.leases[0].episode_id
        self.num_acked = 0
        self.longest_s = 0.0

    def play(self) -> None:
        before = time.monotonic()
        self.deliver(self.num_acked + 1, make_step(self.episode_id, self.num_acked))
        self.expect_ack()
        self.longest_s = max(self.longest_s, time.monotonic() - before)

    def end(self) -> None:
        end = make_end(self.episode_id, self.num_acked)
        self.send(Delivery(sequence=self.num_acked + 1, ends=(end,)))
        self.expect_ack()

    def expect_ack(self) -> None:
        self.num_acked += 1
        while isinstance(answer := self.receive(), Grant):
            pass
        assert answer == Ack(sequence=self.num_acked)


def refusals_until(rogue: RawActor, marker: str) -> list[str]:
    reasons: list[str] = []
    while True:
        answer = rogue.receive()
        assert answer is not None, "the server does not answer any more"
        if isinstance(answer, Refused):
            if marker in answer.reason:
                return reasons
            assert answer.reason
            reasons.append(answer.reason)


@pytest.mark.parametrize(
    "num_inputs",
    [NUM_OVER_SOCKETS, pytest.param(NUM_OVER_SOCKETS_SLOW, marks=pytest.mark.slow)],
)
def test_a_service_under_fire_refuses_counts_and_serves_the_others(rig, num_inputs):
    mutator = Mutator(seed=2)
    decoder: FrameDecoder = FrameDecoder(ToLearner, Limits())
    num_unreadable = num_refused = num_markers = 0
    before = 0
    with GoodActor(rig.address) as good:
        for batch in range(num_inputs // PER_CONNECTION):
            if batch == 10:
                before = resident_bytes()
            with RawActor(rig.address) as rogue:
                for number in range(PER_CONNECTION):
                    frames = mutator.input(DRAWN[number % len(DRAWN)])
                    try:
                        decoder.decode(frames)
                    except ProtocolError:
                        num_unreadable += 1
                    rogue.send(make_hello(f"rogue-{batch}-{number}", capacity=1))
                    rogue.send_frames(frames)
                    rogue.send(Goodbye(reason="next"))
                num_markers += 1
                rogue.send(make_hello("rogue", protocol_version=1000 + batch))
                num_refused += len(refusals_until(rogue, f"protocol version {1000 + batch},"))
            good.play()
        good.end()
    stats = rig.stats
    assert num_unreadable > num_inputs / 2
    assert stats.malformed >= num_unreadable  # and what could be read but says nonsense
    assert num_refused >= stats.malformed  # and other versions
    assert stats.refused == num_refused + num_markers
    assert resident_bytes() - before < 64 * MIB
    assert rig.service._server.failure is None
    assert good.longest_s < 10.0
    with rig.run_file._transaction(synced=False) as connection:
        stored = connection.execute("SELECT episode_id, COUNT(*) FROM steps GROUP BY 1").fetchall()
        (excluded,) = connection.execute("SELECT excluded FROM episodes").fetchone()
    assert stored == [(good.episode_id, num_inputs // PER_CONNECTION)]
    assert excluded == ""


def test_bytes_that_are_no_zeromq_are_cut_off_and_others_go_on(rig):
    host, _, port = rig.address.removeprefix("tcp://").rpartition(":")
    generator = random.Random(3)
    greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    introduced = greeting + b"\x04" + bytes([len(ready)]) + ready
    with GoodActor(rig.address) as good:
        before = resident_bytes()
        for number in range(60):
            with socket.create_connection((host, int(port)), timeout=10) as stranger:
                if number % 3 == 0:  # announces a frame of 2 to 4 EiB
                    stranger.sendall(
                        introduced + b"\x02" + struct.pack(">Q", 2 ** (61 + number % 2))
                    )
                    while stranger.recv(4096):  # until it is cut off; a timeout is an error
                        pass
                else:
                    stranger.sendall(generator.randbytes(generator.randrange(1, 4000)))
            good.play()
        assert resident_bytes() - before < 32 * MIB
        good.end()
    assert rig.service._server.failure is None
