"""A learner that keeps what it is told, and an actor that plays scripted games for it."""

import asyncio
import sys
import threading

import numpy as np

from capo.actors.worker import Worker
from capo.configs.schema import RolloutConfig
from capo.envs.api import Action, Message, Observation, Options, Transition
from capo.protocol.messages import (
    ActorSetup,
    Delivery,
    GroupForm,
    GroupInvite,
    Hello,
    Ready,
    Refused,
    ToLearner,
    UpdateWeights,
    WeightsReport,
    Welcome,
)
from capo.protocol.records import EpisodeEnd, Lease, Purpose, Step, Task
from capo.protocol.server import Server
from tests.fakes import Answer, ScriptedEngine, ScriptedEnv, transition

USER = (Message("user", "look"),)


def exits(action: Action) -> Transition:
    sys.exit(3)


def interrupts(action: Action) -> Transition:
    raise KeyboardInterrupt


def closes(action: Action) -> Transition:
    raise GeneratorExit


WORST: dict[bytes, Transition | Answer | Exception] = {
    b"fire": RuntimeError("fire"),
    b"exit": exits,
    b"interrupt": interrupts,
    b"generator": closes,
    b"surrogate error": ValueError("\ud800"),
    b"surrogate key": transition(observation=Observation(messages=USER, state_key="\ud800")),
    b"no key": transition(observation=Observation(messages=USER, state_key=None)),
    b"long key": transition(observation=Observation(messages=USER, state_key="k" * 100_000)),
    b"no messages": transition(observation=Observation(messages=None)),
    b"two flags": transition(terminated=np.array([True, False])),
    b"flood": transition(observation=Observation(messages=(Message("r" * 10_000_000, ""),))),
}


class Factory:
    """Two turns and out; a task's payload says how the second one goes."""

    made = 0

    def make(self) -> ScriptedEnv:
        Factory.made += 1
        return PayloadEnv()

    def tasks(self, split: str) -> list[Task]:
        return []


class PayloadEnv(ScriptedEnv):
    def __init__(self) -> None:
        super().__init__([])

    async def reset(self, task, seed):
        last = transition("you see the cup", reward=1.0, terminated=True, outcome=1.0)
        self.payload = task.payload
        second = WORST.get(task.payload, last)
        self.script = [transition(), second]
        return await super().reset(task, seed)

    def close(self):
        if self.payload == b"exit":
            sys.exit(5)
        return super().close()


class BrokenFactory(Factory):
    def make(self) -> ScriptedEnv:
        raise OSError("no licence for the simulator")


def make(options: Options) -> Factory:
    return BrokenFactory() if options.get("broken") else Factory()


class Learner:
    """A Handler that keeps what it is told."""

    def __init__(self, setup: ActorSetup) -> None:
        self.setup = setup
        self.refusal = ""
        self.hellos: list[Hello] = []
        self.controls: list[ToLearner] = []
        self.steps: list[Step] = []
        self.ends: list[EpisodeEnd] = []
        self.last = 0
        self.gate = threading.Event()  # commits are made while it is set
        self.gate.set()
        self.gone: list[str] = []
        self.server = Server("tcp://127.0.0.1:0", self)
        self.address = self.server.start()

    def hello(self, hello: Hello) -> Welcome | Refused:
        self.hellos.append(hello)
        if self.refusal:
            return Refused(reason=self.refusal)
        return Welcome(
            run_id="run-1",
            learner_name="learner",
            last_sequence=self.last,
            window=4,
            heartbeat_s=0.1,
            dead_after_s=10.0,
            setup=None if hello.tokenizer_digest else self.setup,
        )

    def commit(self, deliveries: list[tuple[str, Delivery]]) -> None:
        assert self.gate.wait(20)
        for _, delivery in deliveries:
            self.last = delivery.sequence
            self.steps += delivery.steps
            self.ends += delivery.ends

    def control(self, actor_id: str, message: ToLearner) -> None:
        self.controls.append(message)

    def lost(self, actor_id: str, reason: str) -> None:
        self.gone.append(reason)

    def report(self) -> bytes:
        return b"{}"

    def tick(self) -> None:
        pass

    def send(self, message: object) -> None:
        self.server.send(self.hellos[-1].actor_id, message)

    def told(self, kind: type) -> list:
        return [message for message in self.controls if isinstance(message, kind)]

    async def until(self, condition, what: str) -> None:
        for _ in range(2000):
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"waited in vain until {what}")


def lease(number: int, payload: bytes = b"") -> Lease:
    return Lease(
        lease_id=f"l{number}",
        attempt=0,
        task=Task(f"t{number}", payload),
        group_id="g",
        member=number,
        purpose=Purpose.TRAIN,
        seed=number,
        policy_version=0,
    )


def update(version: int) -> UpdateWeights:
    empty = np.empty(0, dtype=np.float32)
    return UpdateWeights(
        epoch=3,
        version=version,
        tensors=(),
        bucket_bytes=1,
        checksum="",
        probe=np.empty(0, dtype=np.int32),
        probe_logprobs=empty,
        probe_tolerance=0.0,
        timeout_s=1.0,
    )


FORM = GroupForm(epoch=3, transport="gloo", host="h", port=1, rank=1, world_size=2, timeout_s=1.0)


class World:
    """A learner, an actor that runs against it, and the engine that the actor will have."""

    def __init__(self, setup: ActorSetup, tokenizer, version: int = -1) -> None:
        self.learner = Learner(setup)
        tokens = tokenizer.encode("look<|im_end|>", add_special_tokens=False)
        self.engine = ScriptedEngine([np.asarray(tokens, dtype=np.int32)], version=version)
        self.lines: list[str] = []
        self.start_error: Exception | None = None
        self.worker = Worker(
            self.start_engine, ("gloo",), name="actor-a", progress=self.lines.append
        )

    async def start_engine(self, setup: ActorSetup, rollout: RolloutConfig) -> ScriptedEngine:
        if self.start_error is not None:
            raise self.start_error
        return self.engine

    async def __aenter__(self) -> "World":
        self.running = asyncio.create_task(self.worker.run(self.learner.address))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.running.cancel()
        await asyncio.wait([self.running])
        await asyncio.to_thread(self.learner.server.close)

    async def ready(self) -> None:
        await self.learner.until(lambda: self.learner.told(Ready), "the actor is ready")

    async def give_weights(self, version: int = 0) -> None:
        self.learner.send(GroupInvite(epoch=3))
        self.learner.send(FORM)
        self.learner.send(update(version))
        await self.learner.until(
            lambda: any(r.version == version for r in self.learner.told(WeightsReport)),
            "the weights were reported",
        )

    async def ends(self, count: int) -> list[EpisodeEnd]:
        await self.learner.until(lambda: len(self.learner.ends) >= count, f"{count} ends")
        return self.learner.ends

    async def leave(self) -> None:
        self.worker.drain("Ctrl-C")
        await asyncio.wait_for(self.running, 10)
