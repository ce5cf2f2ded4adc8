"""Token in, token out: what is kept, what is rendered again, and that actions stay as sampled."""

import json
from pathlib import Path

import numpy as np
import pytest

from capo.actors.chat import Chat, Dialogue, find_stop_ids, load_chat
from capo.envs.api import Message, Observation, Tool, ToolCall
from capo.protocol.errors import ConfigError
from capo.protocol.messages import ActorSetup

SEARCH = Tool("search", "Find pages.", {"type": "object", "properties": {"q": {"type": "string"}}})


def user(text: str, **more) -> Observation:
    return Observation(messages=(Message("user", text),), **more)


@pytest.fixture
def chat(word_tokenizer) -> Chat:
    return Chat(word_tokenizer, max_length=64)


@pytest.fixture(scope="module")
def qwen(qwen_folder: Path) -> Chat:
    return load_chat(setup_of(qwen_folder))


def setup_of(folder: Path, **more) -> ActorSetup:
    fields = {
        "environment": "",
        "environment_options": b"{}",
        "rollout": b"{}",
        "model_config": b"{}",
        "model_dtype": "float32",
        "max_length": 4096,
        "tokenizer_files": {path.name: path.read_bytes() for path in folder.iterdir()},
        "tokenizer_digest": "",
        "seed": 0,
    }
    return ActorSetup(**(fields | more))


def sampled(chat: Chat, text: str, stop: bool = True) -> np.ndarray:
    tokens = chat.encode(text)
    stop_id = chat.encode("<|im_end|>")
    return np.concatenate([tokens, stop_id]) if stop else tokens


def test_an_append_only_dialogue_keeps_everything(chat: Chat) -> None:
    dialogue = Dialogue(chat)
    first = dialogue.observe(user("you see the cup"))
    assert first.keep == 0
    action = sampled(chat, "take the cup")
    said = dialogue.act(action)
    assert said.text == "take the cup"
    second = dialogue.observe(user("you see nothing"))
    assert second.keep == len(first.tokens) + len(action)
    np.testing.assert_array_equal(
        second.tokens[: second.keep], np.concatenate([first.tokens, action])
    )
    assert chat.decode(second.observation) == (
        "<|im_start|>user\nyou see nothing<|im_end|><|im_start|>assistant\n"
    )


def test_the_prompt_is_what_the_template_renders(chat: Chat) -> None:
    dialogue = Dialogue(chat)
    dialogue.observe(user("you see the cup"))
    dialogue.act(sampled(chat, "take the cup"))
    prompt = dialogue.observe(user("you see nothing"))
    messages = [
        Message("user", "you see the cup"),
        Message("assistant", "take the cup"),
        Message("user", "you see nothing"),
    ]
    assert chat.decode(prompt.tokens) == chat.render(messages, ())


def test_an_action_is_never_tokenised_again(chat: Chat) -> None:
    """The same text in other tokens than the tokenizer would choose: they must stay."""
    spelled = np.concatenate([chat.encode(letter) for letter in "take"])
    assert len(spelled) == 4
    assert len(chat.encode("take")) == 1
    action = np.concatenate([spelled, chat.encode("<|im_end|>")])
    dialogue = Dialogue(chat)
    first = dialogue.observe(user("look"))
    assert dialogue.act(action).text == "take"
    second = dialogue.observe(user("look"))
    assert second.keep == len(first.tokens) + 5
    np.testing.assert_array_equal(second.tokens[len(first.tokens) : second.keep], action)


def test_the_end_that_the_template_adds_to_a_cut_action_is_observation(chat: Chat) -> None:
    dialogue = Dialogue(chat)
    first = dialogue.observe(user("look"))
    action = sampled(chat, "take the", stop=False)
    dialogue.act(action)
    second = dialogue.observe(user("look"))
    assert second.keep == len(first.tokens) + len(action)
    assert chat.decode(second.observation).startswith("<|im_end|>")


def test_a_rebuilt_observation_forgets_what_was_said_but_keeps_the_common_start(
    chat: Chat,
) -> None:
    dialogue = Dialogue(chat)
    first = dialogue.observe(user("you see the cup"))
    dialogue.act(sampled(chat, "take the cup"))
    second = dialogue.observe(user("you see the table", rebuilt=True))
    assert chat.decode(second.tokens) == chat.render([Message("user", "you see the table")], ())
    shared = chat.encode("<|im_start|>user\nyou see the")
    assert second.keep == len(shared)
    np.testing.assert_array_equal(first.tokens[: second.keep], second.tokens[: second.keep])


def test_bytes_that_are_no_text_do_not_break_the_dialogue(chat: Chat) -> None:
    """Half of a two-byte character: the text shows a replacement, the tokens stay."""
    half = chat.encode("é")[:1]
    action = np.concatenate([half, chat.encode("<|im_end|>")])
    dialogue = Dialogue(chat)
    first = dialogue.observe(user("look"))
    assert dialogue.act(action).text == "\N{REPLACEMENT CHARACTER}"
    second = dialogue.observe(user("look"))
    assert second.keep == len(first.tokens) + len(action)
    np.testing.assert_array_equal(second.tokens[len(first.tokens) : second.keep], action)


def test_an_overlong_prompt_leaves_no_room(word_tokenizer) -> None:
    chat = Chat(word_tokenizer, max_length=16)
    dialogue = Dialogue(chat, "end", max_action_tokens=10)
    prompt = dialogue.observe(user("look look look look"))
    assert 0 < dialogue.room() == 16 - len(prompt.tokens)
    dialogue.act(sampled(chat, "look"))
    dialogue.observe(user("look look look look look look"))
    assert dialogue.room() <= 0


def test_drop_oldest_leaves_out_the_oldest_exchange_but_never_the_task(word_tokenizer) -> None:
    chat = Chat(word_tokenizer, max_length=60)
    dialogue = Dialogue(chat, "drop_oldest", max_action_tokens=8)
    dialogue.observe(
        Observation(messages=(Message("system", "the table"), Message("user", "put the cup")))
    )
    dropped = 0
    for _ in range(8):
        dialogue.act(sampled(chat, "look"))
        prompt = dialogue.observe(user("you see nothing"))
        assert dialogue.room() == 8
        dropped += prompt.dropped_messages
    assert dropped > 0
    assert dropped % 2 == 0
    text = chat.decode(prompt.tokens)
    assert text.startswith("<|im_start|>system\nthe table<|im_end|><|im_start|>user\nput the cup")
    assert text.count("look") == 8 - dropped // 2


def test_drop_oldest_gives_up_when_the_last_exchange_alone_is_too_long(word_tokenizer) -> None:
    chat = Chat(word_tokenizer, max_length=24)
    dialogue = Dialogue(chat, "drop_oldest", max_action_tokens=4)
    dialogue.observe(user("look"))
    dialogue.act(sampled(chat, "look"))
    dialogue.observe(user("look " * 30))
    assert dialogue.room() <= 0


def test_a_tokenizer_without_template_or_end_is_refused(word_tokenizer) -> None:
    with pytest.raises(ConfigError, match="end-of-sequence"):
        Chat(word_tokenizer, max_length=8, stop_token_ids=())

    class Bare:
        chat_template = None

    with pytest.raises(ConfigError, match="chat template"):
        Chat(Bare(), max_length=8)


def test_stop_tokens_come_from_the_tokenizer_the_configs_and_the_template(qwen: Chat) -> None:
    end = qwen.encode("<|im_end|>")[0]
    of_text = qwen.encode("<|endoftext|>")[0]
    assert qwen.stop_token_ids == (end,)
    config = json.dumps({"eos_token_id": [int(of_text), int(end)]}).encode()
    assert find_stop_ids(qwen.tokenizer, [config]) == (of_text, end)


def test_qwen_strips_earlier_thinking_which_starts_a_new_segment(qwen: Chat) -> None:
    thinking = Chat(qwen.tokenizer, max_length=4096, enable_thinking=True)
    dialogue = Dialogue(thinking)
    first = dialogue.observe(user("Where is the cup?"))
    action = sampled(thinking, "<think>\nCups are on tables.\n</think>\n\nOn the table.")
    dialogue.act(action)
    second = dialogue.observe(user("And the plate?"))
    everything = len(first.tokens) + len(action)
    assert second.keep == len(first.tokens)  # up to where the thought began
    assert second.keep < everything
    text = thinking.decode(second.tokens)
    assert "Cups are on tables." not in text
    assert "On the table.<|im_end|>" in text


def test_qwen_without_thinking_rebuilds_because_the_empty_thought_is_stripped_too(
    qwen: Chat,
) -> None:
    dialogue = Dialogue(qwen)
    first = dialogue.observe(user("Where?"))
    assert qwen.decode(first.tokens).endswith("assistant\n<think>\n\n</think>\n\n")
    dialogue.act(sampled(qwen, "There."))
    second = dialogue.observe(user("Where?"))
    assert 0 < second.keep < len(first.tokens)


def test_qwen_tool_calls_go_round_and_the_thought_after_a_tool_answer_stays(qwen: Chat) -> None:
    thinking = Chat(qwen.tokenizer, max_length=4096, enable_thinking=True)
    dialogue = Dialogue(thinking)
    first = dialogue.observe(user("Find cups.", tools=(SEARCH,)))
    assert '"name": "search"' in thinking.decode(first.tokens)
    text = (
        "<think>\nI search.\n</think>\n\n"
        '<tool_call>\n{"name": "search", "arguments": {"q": "cups"}}\n</tool_call>'
    )
    action = sampled(thinking, text)
    said = dialogue.act(action)
    assert said.tool_calls == (ToolCall("search", {"q": "cups"}),)
    assert said.malformed == ""
    second = dialogue.observe(Observation(messages=(Message("tool", "3 cups"),)))
    assert second.keep == len(first.tokens) + len(action)
    assert "<tool_response>\n3 cups\n</tool_response>" in thinking.decode(second.observation)
    np.testing.assert_array_equal(second.tokens[len(first.tokens) : second.keep], action)


def test_a_file_name_that_leaves_the_folder_is_refused(qwen_folder: Path) -> None:
    setup = setup_of(qwen_folder, tokenizer_files={"../evil": b""})
    with pytest.raises(ConfigError, match="evil"):
        load_chat(setup)


def test_tools_that_the_template_leaves_out_stand_in_the_system_message(chat: Chat) -> None:
    tool = Tool(name="act", description="do it", parameters={"type": "object"})
    asked = [Message("system", "be brief"), Message("user", "go")]
    text = chat.render(asked, [tool])
    assert text.index("be brief") < text.index('"act"') < text.index("<tool_call>")
    assert text.index("<tool_call>") < text.index("go")
    assert '"act"' in chat.render(asked[1:], [tool])
    assert "<tool_call>" not in chat.render(asked, [])
