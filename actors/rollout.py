"""One episode: the environment speaks, the policy answers, every transition is told at once.

What goes wrong outside the policy (the environment raises, hangs or returns nonsense; the engine
dies) ends the episode with its own status. It is never a reward of 0.
"""

import contextlib
import functools
import hashlib
import time
from collections.abc import AsyncGenerator, Awaitable, Iterator

import numpy as np

from capo.actors.chat import Chat, Dialogue, Prompt
from capo.actors.engine import Engine, Sample
from capo.actors.env_answers import checked_observation, checked_transition
from capo.actors.foreign import sentence
from capo.actors.guards import env_call, next_prompt, trainable_sample
from capo.configs.schema import RolloutConfig
from capo.envs.api import Action, Env, Transition
from capo.protocol.errors import EngineError, EnvError
from capo.protocol.records import EpisodeEnd, EpisodeStatus, Lease, Purpose, Step


async def play(
    lease: Lease, env: Env, chat: Chat, engine: Engine, config: RolloutConfig
) -> AsyncGenerator[Step | EpisodeEnd, None]:
    """Yields every Step as soon as its reward is known, and exactly one EpisodeEnd at last.

    Raises nothing but CancelledError; the environment stays open, its owner closes it.
    """
    tally = _Tally()
    dialogue = Dialogue(chat, config.on_overlong, config.max_action_tokens)
    temperature = 0.0 if lease.purpose is Purpose.EVAL_GREEDY else config.temperature
    try:
        with tally.env_time():
            first = await env_call(
                "reset", lambda: env.reset(lease.task, lease.seed), config.env_timeout_s
            )
        observation = checked_observation(first)
        prompt = next_prompt(dialogue, observation)
        tally.dropped_messages += prompt.dropped_messages
        if dialogue.room() < 1:
            raise EnvError(
                f"the first prompt has {len(prompt.tokens)} tokens and leaves no room for an "
                f"action in model.max_length {chat.max_length}; raise it or shorten the observation"
            )
        while True:
            started = time.monotonic()
            sample = await trainable_sample(
                engine,
                engine.generate(
                    prompt.tokens,
                    max_tokens=dialogue.room(),
                    temperature=temperature,
                    seed=action_seed(lease.seed, tally.steps),
                    stop_token_ids=chat.stop_token_ids,
                ),
                config.engine_timeout_s,
            )
            tally.count(sample, time.monotonic() - started)
            action = dialogue.act(sample.tokens)
            tally.malformed += action.malformed != ""
            with tally.env_time():
                answer = await env_call(
                    "step", functools.partial(_step, env, action), config.env_timeout_s
                )
            transition = checked_transition(answer)
            tally.outcome = transition.outcome
            yield Step(
                episode_id=lease.episode_id,
                index=tally.steps,
                keep=prompt.keep,
                observation=prompt.observation,
                action=sample.tokens,
                behaviour_logprobs=sample.logprobs,
                versions=sample.versions,
                reward=transition.reward,
                entropies=sample.entropies,
                state_key=observation.state_key,
                info=transition.info,
            )
            tally.steps += 1
            observation = checked_observation(transition.observation)
            if transition.terminated:
                yield _end(lease, EpisodeStatus.TERMINATED, tally)
                return
            prompt = next_prompt(dialogue, observation)
            tally.dropped_messages += prompt.dropped_messages
            tally.overlong = dialogue.room() < 1
            if transition.truncated or tally.overlong:
                yield _truncated(lease, prompt, chat.max_length, tally)
                return
    except EnvError as error:
        yield _end(lease, EpisodeStatus.ENV_ERROR, tally, error)
    except EngineError as error:
        yield _end(lease, EpisodeStatus.ENGINE_ERROR, tally, error)


def _step(env: Env, action: Action) -> Awaitable[Transition]:
    return env.step(action)  # looked up inside the guarded call


def action_seed(lease_seed: int, index: int) -> int:
    """The seed of one action: 62 bits that depend on the lease's seed and the step alone."""
    digest = hashlib.blake2b(f"action/{lease_seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


class _Tally:
    """What an episode counts on its way."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self.cut = 0  # actions that ended for length
        self.malformed = 0
        self.dropped_messages = 0
        self.overlong = False
        self.outcome = 0.0
        self.engine_s = 0.0
        self.env_s = 0.0

    def count(self, sample: Sample, engine_s: float) -> None:
        self.engine_s += engine_s
        self.tokens += len(sample.tokens)
        self.cut += not sample.stopped

    @contextlib.contextmanager
    def env_time(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.env_s += time.monotonic() - started

    def metrics(self) -> dict[str, float]:
        return {
            "action_tokens": float(self.tokens),
            "actions_cut": float(self.cut),
            "malformed_calls": float(self.malformed),
            "dropped_messages": float(self.dropped_messages),
            "overlong": float(self.overlong),
            "engine_s": self.engine_s,
            "env_s": self.env_s,
        }


def _truncated(lease: Lease, prompt: Prompt, max_length: int, tally: _Tally) -> EpisodeEnd:
    """With the prompt the policy would have read next, cut to what the model can read."""
    tokens = prompt.tokens[:max_length]
    keep = min(prompt.keep, len(tokens))
    return _end(lease, EpisodeStatus.TRUNCATED, tally, final=Prompt(tokens=tokens, keep=keep))


def _end(
    lease: Lease,
    status: EpisodeStatus,
    tally: _Tally,
    error: Exception | None = None,
    final: Prompt | None = None,
) -> EpisodeEnd:
    return EpisodeEnd(
        episode_id=lease.episode_id,
        status=status,
        num_steps=tally.steps,
        outcome=tally.outcome if error is None else 0.0,
        final_keep=0 if final is None else final.keep,
        final_observation=None if final is None else np.ascontiguousarray(final.observation),
        metrics=tally.metrics(),
        error="" if error is None else sentence(error),
    )
