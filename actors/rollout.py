"""One episode: the environment speaks, the policy answers, every transition is told at once.

What goes wrong outside the policy (the environment raises, hangs or returns nonsense; the engine
dies) ends the episode with its own status. It is never a reward of 0.
"""

import asyncio
import functools
import hashlib
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import numpy as np

from capo.actors.chat import Chat, Dialogue, Prompt
from capo.actors.engine import Engine, Sample
from capo.configs.schema import RolloutConfig
from capo.envs.api import Env, Observation, Transition
from capo.protocol.errors import EngineError, EnvError
from capo.protocol.records import EpisodeEnd, EpisodeStatus, Lease, Purpose, Step

MAX_ERROR_LENGTH = 1000
T = TypeVar("T")


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
        observation = await _env_call(
            "reset", lambda: env.reset(lease.task, lease.seed), config.env_timeout_s, tally
        )
        prompt = _observe(dialogue, observation, tally)
        if dialogue.room() < 1:
            raise EnvError(
                f"the first prompt has {len(prompt.tokens)} tokens and leaves no room for an "
                f"action in model.max_length {chat.max_length}; raise it or shorten the observation"
            )
        while True:
            started = time.monotonic()
            sample = await _sample(
                engine.generate(
                    prompt.tokens,
                    max_tokens=dialogue.room(),
                    temperature=temperature,
                    seed=action_seed(lease.seed, tally.steps),
                    stop_token_ids=chat.stop_token_ids,
                ),
                config.engine_timeout_s,
            )
            tally.engine_s += time.monotonic() - started
            tally.tokens += len(sample.tokens)
            tally.cut += not sample.stopped
            action = dialogue.act(sample.tokens)
            tally.malformed += action.malformed != ""
            transition = await _env_call(
                "step", functools.partial(env.step, action), config.env_timeout_s, tally
            )
            reward, info = _checked(transition, tally)
            yield Step(
                episode_id=lease.episode_id,
                index=tally.steps,
                keep=prompt.keep,
                observation=prompt.observation,
                action=sample.tokens,
                behaviour_logprobs=sample.logprobs,
                versions=sample.versions,
                reward=reward,
                entropies=sample.entropies,
                state_key=observation.state_key,
                info=info,
            )
            tally.steps += 1
            observation = transition.observation
            if transition.terminated:
                yield _end(lease, EpisodeStatus.TERMINATED, tally)
                return
            prompt = _observe(dialogue, observation, tally)
            tally.overlong = dialogue.room() < 1
            if transition.truncated or tally.overlong:
                yield _truncated(lease, prompt, chat.max_length, tally)
                return
    except EnvError as error:
        yield _end(lease, EpisodeStatus.ENV_ERROR, tally, error)
    except EngineError as error:
        yield _end(lease, EpisodeStatus.ENGINE_ERROR, tally, error)


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


def _observe(dialogue: Dialogue, observation: Observation, tally: _Tally) -> Prompt:
    """A template that cannot render what an environment said is the environment's error."""
    if not isinstance(observation, Observation):
        raise EnvError(
            f"the environment returned a {type(observation).__name__} where an Observation belongs"
        )
    size = sum(len(str(getattr(one, "content", ""))) for one in observation.messages)
    if size > dialogue.max_characters:
        raise EnvError(
            f"the environment returned {size:,} characters of text, and model.max_length cannot "
            f"hold more than {dialogue.max_characters:,}"
        )
    if not observation.messages and observation.rebuilt:
        raise EnvError("the environment returned a rebuilt observation without messages")
    try:
        prompt = dialogue.observe(observation)
    except Exception as error:  # jinja's and the tokenizer's classes share no base
        raise EnvError(f"the chat template cannot render the observation: {error}") from error
    tally.dropped_messages += prompt.dropped_messages
    return prompt


async def _env_call(
    name: str, call: Callable[[], Coroutine[Any, Any, T]], timeout_s: float, tally: _Tally
) -> T:
    """The answer, or EnvError. A call that hangs is cancelled and left behind, not waited for."""
    started = time.monotonic()
    try:
        task = asyncio.ensure_future(call())
    except Exception as error:  # anything a foreign environment raises
        raise EnvError(f"{name} is no coroutine, or raised at once: {error}") from error
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        _abandon(task)
        raise
    tally.env_s += time.monotonic() - started
    if not done:
        _abandon(task)
        raise EnvError(f"{name} did not return within rollout.env_timeout_s = {timeout_s:g} s")
    try:
        return task.result()
    except (Exception, asyncio.CancelledError) as error:  # anything a foreign environment raises
        raise EnvError(f"{name} raised {type(error).__name__}: {error}") from error


async def _sample(call: Coroutine[Any, Any, Sample], timeout_s: float) -> Sample:
    """One action that can be trained on, or EngineError whatever else the engine does."""
    try:
        async with asyncio.timeout(timeout_s):
            sample = await call
    except TimeoutError as error:
        raise EngineError(
            f"the engine did not answer within rollout.engine_timeout_s = {timeout_s:g} s"
        ) from error
    except EngineError:
        raise
    except Exception as error:  # a bug of the engine ends this episode, not the actor
        raise EngineError(f"the engine raised {type(error).__name__}: {error}") from error
    length = len(sample.tokens)
    if length == 0:
        raise EngineError("the engine returned an action without a token")
    if len(sample.logprobs) != length or not np.isfinite(sample.logprobs).all():
        raise EngineError(
            f"the engine returned {len(sample.logprobs)} log-probs for an action of {length} "
            f"tokens, of which {int(np.isfinite(sample.logprobs).sum())} are finite"
        )
    return sample


def _abandon(task: "asyncio.Future[Any]") -> None:
    task.cancel()
    # Whatever it still raises has been reported as a time-out already.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())


def _checked(transition: Transition, tally: _Tally) -> tuple[float, dict[str, float]]:
    """Reward and info as finite floats; the outcome goes to the tally."""
    if not isinstance(transition, Transition):
        raise EnvError(f"step returned a {type(transition).__name__}, not a Transition")
    names = transition.info if isinstance(transition.info, dict) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise EnvError("the environment returned an info that is no dict of names to numbers")
    tally.outcome = _finite("outcome", transition.outcome)
    info = {name: _finite(f"info[{name!r}]", value) for name, value in transition.info.items()}
    return _finite("reward", transition.reward), info


def _finite(name: str, value: object) -> float:
    if isinstance(value, str) or value is None:
        raise EnvError(f"the environment returned {value!r} as {name}, which is no number")
    try:
        number = float(value)  # type: ignore[arg-type]  # numpy scalars and one-element tensors too
    except (TypeError, ValueError) as error:
        raise EnvError(f"the environment returned {value!r} as {name}: {error}") from error
    if not math.isfinite(number):
        raise EnvError(f"the environment returned {number} as {name}")
    return number


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
        error="" if error is None else str(error)[:MAX_ERROR_LENGTH],
    )
