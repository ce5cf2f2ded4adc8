"""One episode with a scripted environment and engine, and everything that is told of it checked."""

import asyncio

import numpy as np

from capo.actors.chat import Chat
from capo.actors.rollout import play
from capo.configs.schema import RolloutConfig
from capo.envs.api import Message, Observation, Tool
from capo.protocol.frames import encode
from capo.protocol.messages import Delivery
from capo.protocol.records import EpisodeEnd, EpisodeStatus, Lease, Purpose, Step, Task
from capo.protocol.validate import check_end, check_step
from tests.fakes import ScriptedEngine

CONFIG = RolloutConfig(max_action_tokens=8, env_timeout_s=5.0, engine_timeout_s=5.0)


def lease(purpose: Purpose = Purpose.TRAIN, seed: int = 7) -> Lease:
    return Lease(
        lease_id="l",
        attempt=2,
        task=Task("t", b"payload"),
        group_id="g",
        member=0,
        purpose=purpose,
        seed=seed,
        policy_version=0,
    )


def engine_saying(chat: Chat, *texts: str) -> ScriptedEngine:
    return ScriptedEngine([chat.encode(f"{text}<|im_end|>") for text in texts])


def run(env, chat, engine, config=CONFIG, the_lease=None) -> list[Step | EpisodeEnd]:
    async def collect() -> list[Step | EpisodeEnd]:
        return [record async for record in play(the_lease or lease(), env, chat, engine, config)]

    records = asyncio.run(collect())
    for record in records[:-1]:
        assert isinstance(record, Step)
        check_step(record)
    assert isinstance(records[-1], EpisodeEnd)
    check_end(records[-1])
    assert records[-1].num_steps == len(records) - 1
    encode(Delivery(sequence=1, steps=tuple(records[:-1]), ends=(records[-1],)))
    return records


def sequences(steps: list[Step]) -> list[np.ndarray]:
    """The full sequences, put together from `keep` as a learner does it."""
    out: list[np.ndarray] = []
    for step in steps:
        before = out[-1][: step.keep] if out else np.empty(0, np.int32)
        out.append(np.concatenate([before, step.observation, step.action]))
    return out


def raising(error: BaseException):
    """A step of a script that raises what must not be raised while the script is made."""

    def answer(action):
        raise error

    return answer


def seen(**changes) -> Observation:
    fields = {"messages": (Message("user", "look"),)}
    return Observation(**(fields | changes))


def tool(name="look", description="", parameters=None) -> Tool:
    return Tool(name, description, {} if parameters is None else parameters)


USER = Message("user", "look")


def assert_env_error(records: list[Step | EpisodeEnd], told: int, complaint: str) -> None:
    """`told` steps, then an end that blames the environment and claims no success."""
    *steps, end = records
    assert len(steps) == told
    assert end.status is EpisodeStatus.ENV_ERROR
    assert complaint in end.error, end.error
    assert end.outcome == 0.0
