"""The words around the game: what an agent is told before it acts, and how its answer is read."""

from collections.abc import Sequence

from capo.envs.api import Action, Message, Tool

TOOL_NAME = "act"
TOOL = Tool(
    name=TOOL_NAME,
    description="Do one thing in the house. Exactly one call per turn.",
    parameters={
        "type": "object",
        "properties": {
            "command": {
                "type": "string",
                "description": "One of the admissible commands, copied exactly.",
            }
        },
        "required": ["command"],
    },
)
_SYSTEM = Message(
    role="system",
    content=(
        "You are a robot in a household that is described in text. You carry out a task by one "
        f"command per turn. Each turn, call the tool {TOOL_NAME} exactly once, with one of the "
        "admissible commands of that turn, copied exactly. Anything else is not understood and "
        "the turn is lost. You can carry one thing at a time. Things may be inside closed "
        "receptacles: go there and open them."
    ),
)


def messages(
    *,
    task: str,
    observation: str,
    commands: Sequence[str],
    recent: Sequence[str],
    feedback: str,
) -> tuple[Message, ...]:
    """The whole prompt. `recent` are the last commands done; `feedback` is on the last answer.

    It does not count turns: an episode that is cut off is to be valued as one that goes on.
    """
    parts = [f"Your task is to: {task}"]
    if recent:
        parts.append("What you did last, oldest first:\n" + "\n".join(recent))
    parts.append(f"What you see now:\n{observation}")
    parts.append("Admissible commands:\n" + "\n".join(commands))
    if feedback:
        parts.append(f"Your last answer was not understood: {feedback}")
    parts.append(f"Call {TOOL_NAME} with exactly one of the admissible commands.")
    return (_SYSTEM, Message(role="user", content="\n\n".join(parts)))


def read_command(action: Action, admissible: Sequence[str]) -> tuple[str, str]:
    """The command that `action` gives, or "" and one sentence on what is wrong with it."""
    if action.malformed:
        return "", action.malformed
    if len(action.tool_calls) != 1:
        number = len(action.tool_calls) or "no"
        return "", f"it has {number} tool calls, where exactly one is needed."
    (call,) = action.tool_calls
    if call.name != TOOL_NAME:
        return "", f"there is no tool {call.name!r}, only {TOOL_NAME!r}."
    command = call.arguments.get("command")
    if not isinstance(command, str) or len(call.arguments) != 1:
        return "", f"{TOOL_NAME} takes one argument, the string `command`."
    if command.strip() not in admissible:
        return "", f"{command.strip()!r} is not one of the admissible commands."
    return command.strip(), ""
