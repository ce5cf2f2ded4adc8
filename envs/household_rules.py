"""The rules of the household world and every sentence it says. One World is one game in progress.

Commands: `go to PLACE`, `open CONTAINER`, `take OBJECT`, `put OBJECT in CONTAINER`,
`put OBJECT on SURFACE`. Only what is in reach can be touched, hands hold one object, and a command
that cannot be done changes nothing.
"""

import hashlib
import re
from collections.abc import Sequence

from capo.envs.household_layout import CONTAINERS, OBJECTS, SURFACES, Layout

GOAL = "Put the {object} {preposition} the {place}. Places: {places}."
CONTENTS = "{Preposition} the {place}: {objects}."
EMPTY = "nothing"
CLOSED = "The {place} is closed."
TAKEN = "You hold the {object}."
PLACED = "The {object} is {preposition} the {place}."
INVALID = "Nothing happens."
COMMANDS = ("go to {place}", "open {place}", "take {object}", "put {object} {preposition} {place}")


def words() -> tuple[str, ...]:
    """Every word and punctuation mark that the world shows or understands, sorted."""
    sentences = (GOAL, CONTENTS, EMPTY, CLOSED, TAKEN, PLACED, INVALID, *COMMANDS)
    said = re.sub(r"\{\w+\}", " ", " ".join(sentences))
    names = {*SURFACES, *CONTAINERS, *OBJECTS, "in", "on", "In", "On", ","}
    return tuple(sorted(names | set(re.findall(r"\w+|[^\w\s]", said))))


class World:
    """Where everything is now. `apply` is the only way to change it."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.place: int | None = None  # where the agent stands; None = the middle of the room
        self.held: int | None = None
        self.at: list[int | None] = list(layout.at)  # None = in the agent's hands
        self.opened = [not layout.is_container(place) for place in range(len(layout.places))]

    @property
    def solved(self) -> bool:
        return self.at[self.layout.goal_object] == self.layout.goal_place

    @property
    def state_key(self) -> str:
        state = repr((self.layout, self.place, self.held, self.at, self.opened))
        return hashlib.blake2b(state.encode(), digest_size=12).hexdigest()

    def goal(self) -> str:
        """The first thing the agent reads: what to do, and where it can go."""
        layout = self.layout
        return GOAL.format(
            object=layout.objects[layout.goal_object],
            preposition=layout.preposition(layout.goal_place),
            place=layout.places[layout.goal_place],
            places=", ".join(layout.places),
        )

    def apply(self, command: str) -> str:
        """Carries out one command and returns the answer; INVALID if it cannot be done."""
        match command.split():
            case ["go", "to", place]:
                return self._go(_index(self.layout.places, place))
            case ["open", place]:
                return self._open(_index(self.layout.places, place))
            case ["take", item]:
                return self._take(_index(self.layout.objects, item))
            case ["put", item, preposition, place]:
                target = _index(self.layout.places, place)
                if target is not None and preposition == self.layout.preposition(target):
                    return self._put(_index(self.layout.objects, item), target)
        return INVALID

    def _go(self, place: int | None) -> str:
        if place is None or place == self.place:
            return INVALID
        self.place = place
        return self._look(place)

    def _open(self, place: int | None) -> str:
        if place is None or place != self.place or self.opened[place]:
            return INVALID
        self.opened[place] = True
        return self._look(place)

    def _take(self, item: int | None) -> str:
        place = self.place
        if item is None or place is None or not self.opened[place]:
            return INVALID
        if self.held is not None or self.at[item] != place:
            return INVALID
        self.held, self.at[item] = item, None
        return TAKEN.format(object=self.layout.objects[item])

    def _put(self, item: int | None, place: int) -> str:
        if item is None or item != self.held or place != self.place or not self.opened[place]:
            return INVALID
        self.held, self.at[item] = None, place
        return PLACED.format(
            object=self.layout.objects[item],
            preposition=self.layout.preposition(place),
            place=self.layout.places[place],
        )

    def _look(self, place: int) -> str:
        name = self.layout.places[place]
        if not self.opened[place]:
            return CLOSED.format(place=name)
        seen = [item for item, at in zip(self.layout.objects, self.at, strict=True) if at == place]
        preposition = self.layout.preposition(place).capitalize()
        return CONTENTS.format(
            Preposition=preposition, place=name, objects=", ".join(seen) or EMPTY
        )


def _index(names: Sequence[str], name: str) -> int | None:
    return names.index(name) if name in names else None
