"""Tool calls in an assistant's text: `<tool_call>` blocks of JSON, as Qwen's templates write them.

What cannot be read is one sentence for the agent, never an exception: agents make such mistakes.
"""

import json
import re
from collections.abc import Sequence

from capo.envs.api import JSON, Message, Tool, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(re.escape(OPEN) + r"(.*?)" + re.escape(CLOSE), re.DOTALL)


def schema_of(tool: Tool) -> dict[str, JSON]:
    """OpenAI's form, which chat templates take."""
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
        },
    }


def with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The same dialogue with the tools described in its system message, made if there is none."""
    schemas = "\n".join(json.dumps(schema_of(tool)) for tool in tools)
    described = (
        f"These functions can be called:\n{schemas}\n"
        f"To call one, write its name and arguments as JSON between tags, like this:\n{OPEN}\n"
        f'{{"name": "{tools[0].name}", "arguments": {{}}}}\n{CLOSE}'
    )
    if messages and messages[0].role == "system":
        system = Message("system", f"{messages[0].content}\n\n{described}")
        return [system, *messages[1:]]
    return [Message("system", described), *messages]


def parse_tool_calls(text: str, tools: Sequence[Tool]) -> tuple[tuple[ToolCall, ...], str]:
    """The calls in order and "", or no calls and why they could not be read.

    What stands before the last `</think>` is thought, not done. Without tools there are no calls.
    """
    if not tools:
        return (), ""
    said = text.rpartition("</think>")[2]
    if "<think>" in said:  # a thought that was never finished
        return (), ""
    blocks = _BLOCK.findall(said)
    if said.count(OPEN) != len(blocks) or said.count(CLOSE) != len(blocks):
        return (), f"every {OPEN} needs its own {CLOSE}"
    names = [tool.name for tool in tools]
    calls = []
    for block in blocks:
        call = _parse(block.strip(), names)
        if isinstance(call, str):
            return (), call
        calls.append(call)
    return tuple(calls), ""


def _parse(block: str, names: Sequence[str]) -> ToolCall | str:
    try:
        call = json.loads(block)
    except (ValueError, RecursionError) as error:  # also of a number too long for Python
        return f"the tool call is not valid JSON ({_short(error)})"
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return 'a tool call is a JSON object with a "name" and "arguments"'
    if call["name"] not in names:
        return f"there is no tool named {call['name'][:64]!r}; the tools are {', '.join(names)}"
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return f"the arguments of {call['name']} are not valid JSON ({_short(error)})"
    if not isinstance(arguments, dict):
        return f"the arguments of {call['name']} must be a JSON object"
    return ToolCall(call["name"], arguments)


def _short(error: Exception) -> str:
    return str(error)[:120]
