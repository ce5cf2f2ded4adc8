"""One episode, told step by step."""

import asyncio

import numpy as np

from capo.actors.chat import Chat
from capo.actors.rollout import action_seed, play
from capo.configs.schema import RolloutConfig
from capo.envs.api import Message, Observation
from capo.protocol.records import EpisodeStatus, Purpose, Step, Task
from tests.actors.scripted_episode import CONFIG, engine_saying, lease, run, sequences
from tests.fakes import ScriptedEnv, transition


def test_a_terminated_episode_tells_every_transition(chat: Chat) -> None:
    env = ScriptedEnv(
        [
            transition("you see the cup", reward=0.25, info={"found": 1.0}),
            transition(reward=1.0, terminated=True, outcome=1.0),
        ]
    )
    engine = engine_saying(chat, "look", "take the cup")
    *steps, end = run(env, chat, engine)
    assert [step.index for step in steps] == [0, 1]
    assert [step.reward for step in steps] == [0.25, 1.0]
    assert [step.state_key for step in steps] == ["start", "you see the cup"]
    assert steps[0].info == {"found": 1.0}
    assert all(step.episode_id == "l.2" for step in steps)
    assert chat.decode(steps[1].action) == "take the cup<|im_end|>"
    assert [action.text for action in env.actions] == ["look", "take the cup"]
    assert env.resets == [(Task("t", b"payload"), 7)]
    assert end.status is EpisodeStatus.TERMINATED
    assert end.outcome == 1.0
    assert end.final_observation is None
    assert end.metrics["action_tokens"] == 6


def test_steps_rebuild_exactly_what_the_engine_read(chat: Chat) -> None:
    env = ScriptedEnv([transition("a"), transition("b"), transition("c", terminated=True)])
    engine = engine_saying(chat, "look", "take", "put")
    *steps, _ = run(env, chat, engine)
    for prompt, step, full in zip(engine.prompts, steps, sequences(steps), strict=True):
        np.testing.assert_array_equal(full, np.concatenate([prompt, step.action]))
    assert steps[1].keep == len(engine.prompts[0]) + len(steps[0].action)


def test_a_rebuilt_prompt_keeps_the_common_start_and_rebuilds_exactly(chat: Chat) -> None:
    again = Observation(messages=(Message("user", "look to the cup"),), rebuilt=True)
    env = ScriptedEnv([transition(observation=again), transition(terminated=True)])
    engine = engine_saying(chat, "go")
    *steps, _ = run(env, chat, engine)
    assert 0 < steps[1].keep < len(engine.prompts[0])
    np.testing.assert_array_equal(sequences(steps)[1][: len(engine.prompts[1])], engine.prompts[1])


def test_a_truncated_episode_carries_the_prompt_for_its_bootstrap(chat: Chat) -> None:
    env = ScriptedEnv([transition("you see nothing", truncated=True)])
    *steps, end = run(env, chat, engine_saying(chat, "look"))
    assert end.status is EpisodeStatus.TRUNCATED
    final = np.concatenate([sequences(steps)[-1][: end.final_keep], end.final_observation])
    messages = [
        Message("user", "look"),
        Message("assistant", "look"),
        Message("user", "you see nothing"),
    ]
    assert chat.decode(final) == chat.render(messages, ())


def test_terminated_wins_over_truncated(chat: Chat) -> None:
    env = ScriptedEnv([transition(terminated=True, truncated=True)])
    assert run(env, chat, engine_saying(chat, "go"))[-1].status is EpisodeStatus.TERMINATED


def test_a_prompt_without_room_truncates_and_is_cut_to_the_models_length(word_tokenizer) -> None:
    chat = Chat(word_tokenizer, max_length=24)
    env = ScriptedEnv([transition("look " * 30)])
    *steps, end = run(env, chat, engine_saying(chat, "look"))
    assert end.status is EpisodeStatus.TRUNCATED
    assert end.metrics["overlong"] == 1.0
    assert end.final_keep + len(end.final_observation) == 24
    assert end.final_keep == len(sequences(steps)[-1])


def test_a_first_prompt_without_room_names_the_setting(word_tokenizer) -> None:
    chat = Chat(word_tokenizer, max_length=8)
    long = ScriptedEnv([], first=Observation(messages=(Message("user", "look " * 30),)))
    (end,) = run(long, chat, engine_saying(chat, "look"))
    assert end.status is EpisodeStatus.ENV_ERROR
    assert "model.max_length 8" in end.error


def test_the_engine_is_asked_with_room_temperature_and_a_seed_per_step(chat: Chat) -> None:
    env = ScriptedEnv([transition(), transition(terminated=True)])
    engine = engine_saying(chat, "go")
    run(env, chat, engine)
    assert [call["temperature"] for call in engine.calls] == [1.0, 1.0]
    assert [call["max_tokens"] for call in engine.calls] == [8, 8]
    assert [call["seed"] for call in engine.calls] == [action_seed(7, 0), action_seed(7, 1)]
    assert len({action_seed(s, i) for s in range(20) for i in range(20)}) == 400
    assert all(0 <= action_seed(s, 0) < 2**62 for s in range(100))


def test_greedy_evaluation_is_temperature_zero(chat: Chat) -> None:
    engine = engine_saying(chat, "go")
    run(
        ScriptedEnv([transition(terminated=True)]),
        chat,
        engine,
        the_lease=lease(Purpose.EVAL_GREEDY),
    )
    assert engine.calls[0]["temperature"] == 0.0


def test_an_action_cut_by_length_is_counted_and_has_no_stop_token(chat: Chat) -> None:
    config = RolloutConfig(max_action_tokens=2)
    *steps, end = run(
        ScriptedEnv([transition(terminated=True)]),
        chat,
        engine_saying(chat, "take the cup"),
        config,
    )
    assert chat.decode(steps[0].action) == "take the"
    assert end.metrics["actions_cut"] == 1.0


def test_a_step_is_told_before_the_next_action_is_sampled(chat: Chat) -> None:
    async def scenario() -> int:
        engine = engine_saying(chat, "go")
        async for record in play(
            lease(), ScriptedEnv([transition(), transition()]), chat, engine, CONFIG
        ):
            assert isinstance(record, Step)
            return len(engine.calls)
        raise AssertionError("no record came")

    assert asyncio.run(scenario()) == 1
