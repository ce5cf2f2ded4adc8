"""What environments and engines may do wrong, each as one EnvError or EngineError.

Both are foreign code to an episode: they may raise anything, hang, or return too much. Which fields
an environment's answer must have is `env_answers`' business.
"""

import asyncio
import inspect
import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
from msgspec import Struct

from capo.actors.chat import MAX_CHARACTERS_PER_TOKEN, Dialogue, Prompt
from capo.actors.engine import Engine, Sample
from capo.actors.foreign import described, shown
from capo.actors.patience import OverdueError, abandon, within
from capo.actors.tool_calls import schema_of
from capo.envs.api import Observation
from capo.protocol.errors import EngineError, EnvError

T = TypeVar("T")


class _Raised(Struct, frozen=True):
    error: BaseException


async def env_call(name: str, call: Callable[[], Awaitable[T]], timeout_s: float) -> T:
    """The answer, or EnvError for whatever is raised, sys.exit() and Ctrl-C's exception included.

    A call that hangs is cancelled and left behind, not waited for. Raises CancelledError only when
    the caller's own task is cancelled.
    """
    task = asyncio.ensure_future(_outcome(call))
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        abandon(task)
        raise
    if not done:
        abandon(task)
        raise EnvError(f"{name} did not return within rollout.env_timeout_s = {timeout_s:g} s")
    if task.cancelled():
        raise EnvError(f"{name} cancelled its own task")
    outcome = task.result()
    if isinstance(outcome, _Raised):
        raise EnvError(f"{name} raised {described(outcome.error)}") from outcome.error
    return outcome


async def _outcome(call: Callable[[], Awaitable[T]]) -> T | _Raised:
    """Nothing is raised here: a task hands SystemExit and KeyboardInterrupt to the event loop."""
    try:
        answer = call()
        if not inspect.isawaitable(answer):
            raise TypeError(f"it is not a coroutine function: it returned {shown(answer)}")
        return await answer
    except BaseException as error:
        return _Raised(error)


def next_prompt(dialogue: Dialogue, observation: Observation) -> Prompt:
    """The prompt after `observation`; EnvError if it is too large or no template renders it."""
    _check_size(dialogue, observation)
    if not observation.messages and observation.rebuilt:
        raise EnvError("the environment returned a rebuilt observation without messages")
    try:
        return dialogue.observe(observation)
    except Exception as error:  # jinja's and the tokenizer's classes share no base
        raise EnvError(
            f"the chat template cannot render the observation: {described(error)}"
        ) from error


def _check_size(dialogue: Dialogue, observation: Observation) -> None:
    """Of all that a template renders; every message is at least one token."""
    most = dialogue.max_characters
    texts = [text for one in observation.messages for text in (one.role, one.content)]
    texts += [json.dumps(schema_of(tool), ensure_ascii=False) for tool in observation.tools]
    if (size := sum(map(len, texts))) > most:
        raise EnvError(
            f"the environment returned {size:,} characters of text, and model.max_length cannot "
            f"hold more than {most:,}"
        )
    count = len(observation.messages)
    if count > most // MAX_CHARACTERS_PER_TOKEN:
        raise EnvError(
            f"the environment returned {count:,} messages, and model.max_length cannot hold more "
            f"than {most // MAX_CHARACTERS_PER_TOKEN:,}"
        )


async def trainable_sample(
    engine: Engine, call: Coroutine[Any, Any, Sample], timeout_s: float
) -> Sample:
    """One action that can be trained on, or EngineError whatever else the engine does."""
    begun_at = time.monotonic()
    try:
        sample = await within(call, timeout_s)
    except OverdueError as error:
        await engine.overdue(begun_at)
        raise EngineError(
            engine.broken
            or f"the engine did not answer within rollout.engine_timeout_s = {timeout_s:g} s"
        ) from error
    except EngineError:
        raise
    except Exception as error:  # a bug of the engine ends this episode, not the actor
        raise EngineError(f"the engine raised {described(error)}") from error
    if fault := _sample_fault(sample):
        raise EngineError(f"the engine returned {fault}")
    return sample


def _sample_fault(sample: object) -> str:
    """What an engine returned instead of an action, "" if it is one."""
    if not isinstance(sample, Sample):
        return f"a {type(sample).__name__}, not a Sample"
    per_token = [("a log-prob", "log-probs", sample.logprobs)]
    if sample.entropies is not None:
        per_token.append(("an entropy", "entropies", sample.entropies))
    for name, values, dtype in [
        ("tokens", sample.tokens, np.int32),
        *((name, values, np.float32) for _, name, values in per_token),
    ]:
        if not isinstance(values, np.ndarray) or values.dtype != dtype or values.ndim != 1:
            return f"{name} that are not a vector of {dtype.__name__}"
    length = len(sample.tokens)
    if length == 0:
        return "an action without a token"
    for one, name, values in per_token:
        if len(values) != length:
            return f"{len(values)} {name} for an action of {length} tokens"
        unusable = values[~np.isfinite(values)]
        if len(unusable):
            return (
                f"{one} of {unusable[0]} for a token that it sampled; its weights or its numerics "
                "are broken"
            )
    covered = sum(span.num_tokens for span in sample.versions)
    if covered != length:
        return f"policy versions for {covered} of the {length} tokens of an action"
    return ""
