"""Broadcasts to members that come, stay away, vanish half-way, or refuse the weights.

The members are threads with real gloo groups over loopback; only the engine behind them is missing.
"""

import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from capo.actors import gloo_group
from capo.actors.engine import UnreachableStoreError
from capo.learner.weight_transfer_gloo import GlooTransport
from capo.learner.weights import WeightBroadcaster, WeightLimits
from capo.protocol.errors import WeightSyncError
from capo.protocol.messages import (
    GroupAccept,
    GroupForm,
    GroupFormed,
    GroupInvite,
    UpdateWeights,
    WeightsReport,
)
from capo.protocol.weight_layout import layout

LIMITS = WeightLimits(
    bucket_bytes=1000, join_timeout_s=1.5, transfer_timeout_s=2.0, probe_tolerance=1e-3
)
PROBE = np.arange(4, dtype=np.int32)
PROBE_LOGPROBS = np.array([-1.0, -2.0, -3.0], dtype=np.float32)


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        ("a", torch.randn(7, 3, generator=generator)),
        ("b", torch.randn(1000, generator=generator).to(torch.bfloat16)),
        ("c", torch.randn(1, generator=generator)),
        ("empty", torch.empty(0, 5)),
    ]


FALSE_PROOFS = {
    "has_no_proof": lambda proof: None,
    "has_half_a_proof": lambda proof: proof[: len(proof) // 2],
    "is_nan": lambda proof: proof * np.float32("nan"),
    "is_far_off": lambda proof: proof + np.float32(1.0),
}


class Member(threading.Thread):
    """`mood`: well, deaf, cut_off, vanishes (in the first transfer), mute (there), bad_check."""

    def __init__(self, name: str, mood: str = "well", workers: int = 1) -> None:
        super().__init__(name=name, daemon=True)
        self.mood = mood
        self.workers = workers
        self.inbox: queue.Queue[object] = queue.Queue()
        self.broadcaster: WeightBroadcaster
        self.groups: list[object] = []
        self.forms: list[GroupForm] = []
        self.got: dict[int, dict[str, torch.Tensor]] = {}

    def run(self) -> None:
        """Like an actor, it answers an invitation while something older still waits."""
        while (message := self.inbox.get()) is not None:
            threading.Thread(target=self.handle, args=(message,), daemon=True).start()

    def handle(self, message: object) -> None:
        answer = self.answer(message)
        if answer is not None:
            self.broadcaster.receive(self.name, answer)

    def answer(self, message: object) -> GroupAccept | GroupFormed | WeightsReport | None:
        if self.mood in ("deaf", "gone"):
            return None
        if isinstance(message, GroupInvite):
            return GroupAccept(epoch=message.epoch, workers=self.workers)
        if isinstance(message, GroupForm):
            return self.form(message)
        assert isinstance(message, UpdateWeights)
        return self.update(message)

    def form(self, form: GroupForm) -> GroupFormed:
        self.forms.append(form)
        try:
            if self.mood == "cut_off":
                raise UnreachableStoreError("cannot reach the store")
            self.groups = join_all(form, self.workers)
        except WeightSyncError as error:
            reached = not isinstance(error, UnreachableStoreError)
            return GroupFormed(epoch=form.epoch, error=str(error), reached=reached)
        return GroupFormed(epoch=form.epoch)

    def update(self, update: UpdateWeights) -> WeightsReport | None:
        if self.mood == "mute":
            return None
        if self.mood == "vanishes":
            self.mood = "gone"
            for group in self.groups:
                group.abort()  # type: ignore[attr-defined]
            self.broadcaster.lost(self.name, "the connection ended")
            return None
        plan = layout(update.tensors)
        try:
            with ThreadPoolExecutor(len(self.groups)) as pool:
                streams = list(
                    pool.map(
                        lambda group: gloo_group.receive(
                            group, plan.total_bytes, update.bucket_bytes, update.timeout_s
                        ),
                        self.groups,
                    )
                )
        except WeightSyncError as error:
            return WeightsReport(
                epoch=update.epoch, version=update.version, error=str(error), broke_off=True
            )
        for stream, checksum in streams:
            assert checksum == update.checksum
            self.got[update.version] = {
                spec.name: stream[o : o + n].view(getattr(torch, spec.dtype)).view(spec.shape)
                for spec, o, n in zip(update.tensors, plan.offsets, plan.sizes, strict=True)
            }
        error = "the probe is off by 3 nats" if self.mood == "bad_check" else ""
        proof = update.probe_logprobs + np.float32(1e-4)
        return WeightsReport(
            epoch=update.epoch,
            version=update.version + (self.mood == "claims_another_version"),
            error=error,
            probe_logprobs=FALSE_PROOFS.get(self.mood, lambda proof: proof)(proof),
            pause_s=0.25,
        )


def join_all(form: GroupForm, workers: int) -> list[object]:
    """All workers of one actor join at once, as tensor-parallel ranks do."""

    def join(rank: int) -> object:
        return gloo_group.join(
            form.host, form.port, form.epoch, rank, form.world_size, form.timeout_s
        )

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(join, range(form.rank, form.rank + workers)))


class World:
    def __init__(self, limits: WeightLimits = LIMITS) -> None:
        self.members: dict[str, Member] = {}
        self.sent: list[tuple[str, object]] = []
        self.broadcaster = WeightBroadcaster(
            self.send, GlooTransport("127.0.0.1"), limits, first_epoch=10
        )

    def send(self, actor_id: str, message: object) -> None:
        self.sent.append((actor_id, message))
        self.members[actor_id].inbox.put(message)

    def add(self, name: str, mood: str = "well", workers: int = 1) -> Member:
        member = Member(name, mood, workers)
        member.broadcaster = self.broadcaster
        self.members[name] = member
        member.start()
        return member

    def broadcast(self, version: int, *members: str):
        return self.broadcaster.broadcast(
            version, iter(weights(version)), members, PROBE, PROBE_LOGPROBS
        )

    def invitations(self) -> list[str]:
        return [actor for actor, message in self.sent if isinstance(message, GroupInvite)]


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for member in world.members.values():
        member.inbox.put(None)
    world.broadcaster.close()


def assert_has(member: Member, version: int) -> None:
    for name, tensor in weights(version):
        assert torch.equal(member.got[version][name], tensor), name


def test_every_member_gets_every_tensor_bit_for_bit(world: World) -> None:
    a, b = world.add("a"), world.add("b")
    report = world.broadcast(1, "a", "b")
    assert report.dropped == {}
    assert {member.actor_id for member in report.updated} == {"a", "b"}
    assert report.updated[0].pause_s == 0.25
    assert report.updated[0].probe_gap == pytest.approx(1e-4, rel=1e-2)
    assert_has(a, 1)
    assert_has(b, 1)
    assert report.num_bytes >= 7 * 3 * 4 + 2000 + 4


def test_the_group_is_kept_while_the_members_are_the_same(world: World) -> None:
    a = world.add("a")
    world.broadcast(1, "a")
    world.broadcast(2, "a")
    assert world.invitations() == ["a"]
    assert_has(a, 2)


def test_a_newcomer_and_a_leaver_form_a_new_group(world: World) -> None:
    world.add("a")
    world.broadcast(1, "a")
    b = world.add("b")
    first = world.broadcast(2, "a", "b")
    second = world.broadcast(3, "b")
    assert first.epoch < second.epoch
    assert_has(b, 2)
    assert_has(b, 3)
    assert b.forms[-1].world_size == 2


def test_an_actor_with_several_workers_takes_as_many_ranks(world: World) -> None:
    a, b = world.add("a", workers=2), world.add("b")
    report = world.broadcast(1, "a", "b")
    assert report.dropped == {}
    assert [a.forms[0].rank, b.forms[0].rank, a.forms[0].world_size] == [1, 3, 4]


def test_no_members_is_no_work(world: World) -> None:
    report = world.broadcaster.broadcast(1, untouchable(), [], PROBE, PROBE_LOGPROBS)
    assert report.updated == ()
    assert world.sent == []


def untouchable() -> Iterator[tuple[str, torch.Tensor]]:
    raise AssertionError("nobody wants these weights")
    yield


def test_one_who_does_not_answer_is_dropped_by_name_and_the_rest_go_on(world: World) -> None:
    a = world.add("a")
    world.add("b", "deaf")
    report = world.broadcast(1, "a", "b")
    assert list(report.dropped) == ["b"]
    assert "invitation" in report.dropped["b"]
    assert_has(a, 1)


def test_one_who_cannot_reach_the_store_is_dropped_and_the_rest_go_on(world: World) -> None:
    a = world.add("a")
    world.add("b", "cut_off")
    report = world.broadcast(1, "a", "b")
    assert report.dropped == {"b": "cannot reach the store"}
    assert_has(a, 1)


def test_one_who_vanishes_in_the_transfer_does_not_stop_the_others(world: World) -> None:
    a, c = world.add("a"), world.add("c")
    world.add("b", "vanishes")
    report = world.broadcast(1, "a", "b", "c")
    assert report.dropped == {"b": "the connection ended"}
    assert {member.actor_id for member in report.updated} == {"a", "c"}
    assert_has(a, 1)
    assert_has(c, 1)


def test_one_who_never_takes_its_part_is_dropped_after_the_time_limit(world: World) -> None:
    a = world.add("a")
    world.add("b", "mute")
    report = world.broadcast(1, "a", "b")
    assert list(report.dropped) == ["b"]
    assert "did not report" in report.dropped["b"]
    assert_has(a, 1)


def test_an_engine_whose_check_fails_is_dropped_and_the_rest_keep_the_weights(
    world: World,
) -> None:
    a = world.add("a")
    world.add("b", "bad_check")
    report = world.broadcast(1, "a", "b")
    assert report.dropped == {"b": "the probe is off by 3 nats"}
    assert [member.actor_id for member in report.updated] == ["a"]
    assert_has(a, 1)


@pytest.mark.parametrize("mood", ["claims_another_version", *FALSE_PROOFS])
def test_a_claim_of_success_without_proof_is_a_failed_check(world: World, mood: str) -> None:
    world.add("a")
    world.add("b", mood)
    report = world.broadcast(1, "a", "b")
    assert list(report.dropped) == ["b"]
    assert [member.actor_id for member in report.updated] == ["a"]


def test_a_member_lost_between_broadcasts_invalidates_the_group(world: World) -> None:
    a = world.add("a")
    world.broadcast(1, "a")
    world.broadcaster.lost("a", "silent")
    report = world.broadcast(2, "a")  # it came back under the same name
    assert report.dropped == {}
    assert world.invitations() == ["a", "a"]
    assert_has(a, 2)


def test_answers_of_an_earlier_epoch_are_ignored(world: World) -> None:
    a = world.add("a")
    world.broadcast(1, "a")
    world.broadcaster.receive("a", WeightsReport(epoch=3, version=2, error="old news"))
    assert world.broadcast(2, "a").dropped == {}
    assert_has(a, 2)


def test_the_store_listens_on_its_own_address_only() -> None:
    transport = GlooTransport("127.0.0.1", timeout_s=5.0)
    _, port = transport.endpoint()
    with socket.socket() as elsewhere:
        # Binding the same port of another address works only if nobody listens on all of them.
        elsewhere.bind(("127.0.0.2", port))
    transport.close()


def test_a_store_on_a_foreign_address_is_one_clear_sentence() -> None:
    with pytest.raises(WeightSyncError, match="weights_host"):
        GlooTransport("192.0.2.1", timeout_s=1.0)
