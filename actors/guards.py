"""What environments and engines may do wrong, each as one EnvError or EngineError.

Both are foreign code to an episode: they may raise anything, hang, or return nonsense.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import numpy as np

from capo.actors.chat import Dialogue, Prompt
from capo.actors.engine import Sample
from capo.envs.api import Observation, Transition
from capo.protocol.errors import EngineError, EnvError

T = TypeVar("T")


async def env_call(name: str, call: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T:
    """The answer, or EnvError. A call that hangs is cancelled and left behind, not waited for."""
    try:
        task = asyncio.ensure_future(call())
    except Exception as error:  # anything a foreign environment raises
        raise EnvError(f"{name} is no coroutine, or raised at once: {error}") from error
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        _abandon(task)
        raise
    if not done:
        _abandon(task)
        raise EnvError(f"{name} did not return within rollout.env_timeout_s = {timeout_s:g} s")
    try:
        return task.result()
    except (Exception, asyncio.CancelledError) as error:  # anything a foreign environment raises
        raise EnvError(f"{name} raised {type(error).__name__}: {error}") from error


def checked_transition(transition: Transition) -> Transition:
    """With reward, outcome and info as finite floats."""
    if not isinstance(transition, Transition):
        raise EnvError(f"step returned a {type(transition).__name__}, not a Transition")
    names = transition.info if isinstance(transition.info, dict) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise EnvError("the environment returned an info that is no dict of names to numbers")
    return msgspec.structs.replace(
        transition,
        outcome=_finite("outcome", transition.outcome),
        info={name: _finite(f"info[{name!r}]", value) for name, value in transition.info.items()},
        reward=_finite("reward", transition.reward),
    )


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


def next_prompt(dialogue: Dialogue, observation: Observation) -> Prompt:
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
        return dialogue.observe(observation)
    except Exception as error:  # jinja's and the tokenizer's classes share no base
        raise EnvError(f"the chat template cannot render the observation: {error}") from error


async def trainable_sample(call: Coroutine[Any, Any, Sample], timeout_s: float) -> Sample:
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
