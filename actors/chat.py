"""Between messages and tokens: what the policy reads, and what its tokens say. Token in, token out.

P prompt tokens, L action tokens. A `Dialogue` keeps the token ids of the sequence so far. When the
messages, rendered again, continue its text, only the rest is tokenised and everything is kept;
otherwise the whole prompt is tokenised and keeps what it has in common. Tokens that were sampled
are never made from text again: an action goes into the history as it came out of the engine.
"""

import json
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError
from msgspec import Struct

from capo.actors.setup_files import write_files
from capo.actors.tool_calls import parse_tool_calls, schema_of, with_tools
from capo.envs.api import Action, Message, Observation, Tool
from capo.protocol.errors import ConfigError
from capo.protocol.messages import ActorSetup
from capo.protocol.records import IntArray

MAX_CHARACTERS_PER_TOKEN = 128  # no tokenizer in use has longer tokens
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")


class Prompt(Struct, frozen=True, kw_only=True):
    """What the policy reads next: `tokens[:keep]` are the start of the sequence before it."""

    tokens: IntArray  # int32 [P]
    keep: int
    dropped_messages: int = 0  # that were left out of this prompt because it was too long

    @property
    def observation(self) -> IntArray:
        """int32 [P - keep]"""
        return self.tokens[self.keep :]


class Chat:
    """A tokenizer and its chat template; one per actor, shared by all its dialogues."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_length: int,
        stop_token_ids: Sequence[int] | None = None,
        enable_thinking: bool = False,
    ) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template, so messages cannot be put before the policy; "
                "choose an instruction-tuned model or add chat_template.jinja to its folder"
            )
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.enable_thinking = enable_thinking
        if stop_token_ids is None:
            stop_token_ids = find_stop_ids(tokenizer, ())
        self.stop_token_ids = tuple(sorted(set(stop_token_ids)))
        if not self.stop_token_ids:
            raise ConfigError(
                "the tokenizer names no end-of-sequence token, so actions would never end; "
                "set eos_token in its tokenizer_config.json"
            )

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """The prompt's text, up to where the assistant begins to speak."""
        if tools and not self._template_shows_tools:
            messages, tools = with_tools(messages, tools), ()
        text: str = self.tokenizer.apply_chat_template(
            [{"role": message.role, "content": message.content} for message in messages],
            tools=[schema_of(tool) for tool in tools] or None,
            add_generation_prompt=True,
            tokenize=False,
            enable_thinking=self.enable_thinking,
        )
        return text

    @cached_property
    def _template_shows_tools(self) -> bool:
        """Some templates silently leave the tools out; then the system message has them."""
        probe = Tool(name="is_this_tool_shown", description="", parameters={})
        try:
            text: str = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": ""}], tools=[schema_of(probe)], tokenize=False
            )
        except TemplateError:  # a template may also refuse them
            return False
        return probe.name in text

    def encode(self, text: str) -> IntArray:
        """int32 [n], without special tokens of the tokenizer's own."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return np.asarray(ids, dtype=np.int32)

    def decode(self, tokens: IntArray) -> str:
        """The text of `tokens` [n], special tokens included."""
        text: str = self.tokenizer.decode(
            tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


class Dialogue:
    """One episode's messages and tokens. Call `observe` and `act` in turn."""

    def __init__(
        self,
        chat: Chat,
        on_overlong: Literal["end", "drop_oldest"] = "end",
        max_action_tokens: int = 1,
    ) -> None:
        self._chat = chat
        self._on_overlong = on_overlong
        self._max_action_tokens = max_action_tokens
        self._messages: list[Message] = []
        self._tools: tuple[Tool, ...] = ()
        self._sequence = np.empty(0, dtype=np.int32)  # prompt and action so far
        self._text = ""  # what the sequence says

    @property
    def max_characters(self) -> int:
        """An observation with more text is not even tokenised, which would take seconds."""
        return MAX_CHARACTERS_PER_TOKEN * self._chat.max_length

    def observe(self, observation: Observation) -> Prompt:
        """The next prompt. It may be too long to act on: see `room`."""
        if observation.rebuilt:
            self._messages = []
        self._messages += observation.messages
        self._tools = observation.tools or self._tools
        prompt = self._prompt(rebuilt=observation.rebuilt)
        dropped = 0
        if self._on_overlong == "drop_oldest":
            while self._too_long_to_go_on(prompt) and (exchange := _oldest(self._messages)):
                del self._messages[exchange]
                dropped += exchange.stop - exchange.start
                prompt = self._prompt(rebuilt=True)
        self._sequence = prompt.tokens
        return Prompt(tokens=prompt.tokens, keep=prompt.keep, dropped_messages=dropped)

    def room(self) -> int:
        """How many tokens the next action may have; 0 or less when the prompt is too long."""
        return min(self._max_action_tokens, self._chat.max_length - len(self._sequence))

    def act(self, tokens: IntArray) -> Action:
        """Append sampled tokens [L], the stop token included, and say what they mean."""
        self._sequence = np.concatenate([self._sequence, tokens])
        self._text += self._chat.decode(tokens)
        stopped = len(tokens) > 0 and int(tokens[-1]) in self._chat.stop_token_ids
        text = self._chat.decode(tokens[:-1] if stopped else tokens)
        self._messages.append(Message("assistant", text))
        calls, malformed = parse_tool_calls(text, self._tools)
        return Action(text=text, tool_calls=calls, malformed=malformed)

    def _prompt(self, rebuilt: bool) -> Prompt:
        before = self._sequence
        text = self._chat.render(self._messages, self._tools)
        if not rebuilt and len(before) and text.startswith(self._text):
            rest = self._chat.encode(text[len(self._text) :])
            prompt = Prompt(tokens=np.concatenate([before, rest]), keep=len(before))
        else:
            tokens = self._chat.encode(text)
            prompt = Prompt(tokens=tokens, keep=_common_prefix(before, tokens))
        self._text = text
        return prompt

    def _too_long_to_go_on(self, prompt: Prompt) -> bool:
        """Leave room for a useful action, not only for its first token."""
        wanted = min(self._max_action_tokens, self._chat.max_length // 4)
        return self._chat.max_length - len(prompt.tokens) < max(1, wanted)


def load_chat(setup: ActorSetup) -> Chat:
    """From the files the learner sent; ConfigError for those that do not make a tokenizer.

    Takes a second: call it off the event loop.
    """
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="capo-tokenizer-") as folder:
        write_files(setup.tokenizer_files, Path(folder))
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"the tokenizer that the learner sent cannot be loaded: {error}"
            ) from error
    configs = [setup.model_config, setup.tokenizer_files.get("generation_config.json", b"{}")]
    return Chat(
        tokenizer,
        max_length=setup.max_length,
        stop_token_ids=find_stop_ids(tokenizer, configs),
        enable_thinking=setup.enable_thinking,
    )


def find_stop_ids(tokenizer: Any, configs: Sequence[bytes]) -> tuple[int, ...]:
    """The tokens that end an action: the tokenizer's, the configs', and the template's own.

    `configs` are the contents of config.json and generation_config.json.
    """
    found: set[int] = set()
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    for config in configs:
        named = json.loads(config).get("eos_token_id")
        found |= {token for token in (named if isinstance(named, list) else [named]) if token}
    vocabulary = tokenizer.get_vocab()
    template = tokenizer.chat_template or ""
    found |= {vocabulary[name] for name in END_OF_TURN if name in vocabulary and name in template}
    return tuple(sorted(found))


def _common_prefix(a: IntArray, b: IntArray) -> int:
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


def _oldest(messages: Sequence[Message]) -> slice | None:
    """The oldest thing the assistant said with the answers to it, unless it is the last one.

    System messages and what came before the assistant first spoke, the task, always stay.
    """
    spoken = [i for i, message in enumerate(messages) if message.role == "assistant"]
    return slice(spoken[0], spoken[1]) if len(spoken) > 1 else None
