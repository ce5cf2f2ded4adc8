"""What an agent may write as a tool call, and the sentence it gets for what it may not."""

import pytest

from capo.actors.tool_calls import parse_tool_calls, schema_of
from capo.envs.api import Tool, ToolCall

TOOLS = (Tool("look", "See.", {}), Tool("go", "Walk.", {"type": "object"}))


def call(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call at all", ()),
        (call('{"name": "look"}'), (ToolCall("look", {}),)),
        (call('\n{"name": "go", "arguments": {"to": 3}}\n'), (ToolCall("go", {"to": 3}),)),
        (call('{"name": "go", "arguments": "{\\"to\\": 3}"}'), (ToolCall("go", {"to": 3}),)),
        (
            call('{"name": "look"}') + " and " + call('{"name": "go"}'),
            (ToolCall("look", {}), ToolCall("go", {})),
        ),
        ("<think>" + call("nonsense") + "</think>" + call('{"name": "go"}'), (ToolCall("go", {}),)),
        ("<think>" + call('{"name": "go"}'), ()),
    ],
)
def test_calls_are_read(text: str, calls: tuple[ToolCall, ...]) -> None:
    assert parse_tool_calls(text, TOOLS) == (calls, "")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (call("{"), "not valid JSON"),
        (call("[1]"), '"name" and "arguments"'),
        (call('{"name": 3}'), '"name" and "arguments"'),
        (call('{"name": "fly"}'), "no tool named 'fly'; the tools are look, go"),
        (call('{"name": "go", "arguments": 3}'), "must be a JSON object"),
        (call('{"name": "go", "arguments": "to"}'), "arguments of go are not valid JSON"),
        ("<tool_call>" + '{"name": "go"}', "needs its own </tool_call>"),
        ('{"name": "go"}</tool_call>', "needs its own </tool_call>"),
        (call('{"name": "look"}') + "<tool_call>", "needs its own"),
        (call("[" * 100_000), "not valid JSON"),
    ],
)
def test_what_cannot_be_read_is_one_sentence_and_no_call(text: str, complaint: str) -> None:
    calls, malformed = parse_tool_calls(text, TOOLS)
    assert calls == ()
    assert complaint in malformed


def test_without_tools_text_is_only_text() -> None:
    assert parse_tool_calls(call("{"), ()) == ((), "")


def test_the_schema_is_openais() -> None:
    assert schema_of(TOOLS[1]) == {
        "type": "function",
        "function": {"name": "go", "description": "Walk.", "parameters": {"type": "object"}},
    }


@pytest.mark.parametrize("arguments", ['{"n": %s}', '"{\\"n\\": %s}"'])
def test_a_number_too_long_for_python_is_a_malformed_call(arguments: str) -> None:
    block = '{"name": "look", "arguments": ' + arguments % ("9" * 5000) + "}"
    calls, malformed = parse_tool_calls(f"<tool_call>{block}</tool_call>", [Tool("look", "", {})])
    assert calls == ()
    assert "not valid JSON" in malformed
