"""What the game says, word for word as TextWorld says it. Names in, sentences out."""

from collections.abc import Collection, Sequence

NOTHING_HAPPENS = "Nothing happens."

_HELP = (
    ("look:", "look around your current location"),
    ("inventory:", "check your current inventory"),
    ("go to (receptacle):", "move to a receptacle"),
    ("open (receptacle):", "open a receptacle"),
    ("close (receptacle):", "close a receptacle"),
    ("take (object) from (receptacle):", "take an object from a receptacle"),
    ("move (object) to (receptacle):", "place an object in or on a receptacle"),
    ("examine (something):", "examine a receptacle or an object"),
    ("use (object):", "use an object"),
    ("heat (object) with (receptacle):", "heat an object using a receptacle"),
    ("clean (object) with (receptacle):", "clean an object using a receptacle"),
    ("cool (object) with (receptacle):", "cool an object using a receptacle"),
    ("slice (object) with (object):", "slice an object using a sharp object"),
)


def introduction(scene: str, task: str) -> str:
    return f"-= Welcome to TextWorld, ALFRED! =-\n\n{scene}\n\nYour task is to: {task}"


def enumeration(items: Sequence[str]) -> str:
    if len(items) < 2:
        return items[0] if items else "nothing"
    return f"{', '.join(items[:-1])}, and {items[-1]}"


def seen(names: Sequence[str]) -> str:
    return enumeration([f"a {name}" for name in names])


def room(receptacles: Sequence[str]) -> str:
    return (
        f"You are in the middle of a room. Looking quickly around you, you see {seen(receptacles)}."
    )


def place(receptacles: Sequence[str], on_the_floor: Sequence[str]) -> str:
    return (
        f"You are facing the {enumeration(receptacles)}. Next to it, you see {seen(on_the_floor)}."
    )


def surface(name: str, contents: Sequence[str]) -> str:
    return f"On the {name}, you see {seen(contents)}."


def opened(name: str, contents: Sequence[str]) -> str:
    return f"The {name} is open. In it, you see {seen(contents)}."


def closed(name: str) -> str:
    return f"The {name} is closed."


def container(name: str, contents: Sequence[str]) -> str:
    """An object that can hold others; its own state is not mentioned."""
    return f"This is a normal {name}. In it, you see {seen(contents)}."


def condition(name: str, states: Collection[str]) -> str:
    """An object by its states, out of clean, hot, cool, sliced and toggled."""
    temperature = "hot" if "hot" in states else "cool" if "cool" in states else ""
    words = []
    if "clean" in states:
        words.append(f"{temperature} and clean" if temperature else "clean")
    elif temperature:
        # An object that is cool and nothing else is called cold.
        words.append("cold" if temperature == "cool" and "sliced" not in states else temperature)
    if "sliced" in states:
        words.append("sliced")
    if "toggled" in states and (not words or words == ["sliced"]):
        return f"This {name} is on."
    if not words:
        return f"There's nothing special about {name}."
    return f"This is a {' '.join(words)} {name}."


def carrying(names: Sequence[str]) -> str:
    return f"You are carrying: {seen(names)}." if names else "You are not carrying anything."


def help_text() -> str:
    # The table's columns are 34 wide, save the one line that is 2 narrower.
    lines = [
        f"  {command:<{32 if command.startswith('move') else 34}}{meaning}"
        for command, meaning in _HELP
    ]
    return "\n".join(["Available commands:", *lines, ""])
