"""A scripted player of the household world. It knows only what it has seen in this game.

It searches the places in the order in which they were listed and then carries the object over.
"""

import random

from capo.envs.household_layout import Layout
from capo.envs.household_rules import World


def most_turns(num_places: int, num_containers: int) -> int:
    """The most turns the expert can need without noise: search, take, carry, put."""
    search = num_places - 1  # never the goal's place: the object is not there
    return search + num_containers + len(("take", "go", "put"))


class Expert:
    """`command` says what to do next; call `look` after every command to remember what was seen."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seen = [False] * len(world.layout.places)

    def look(self) -> None:
        place = self.world.place
        if place is not None and self.world.opened[place]:
            self.seen[place] = True

    def command(self) -> str:
        world, layout = self.world, self.world.layout
        if world.held is not None:
            carried_to = layout.goal_place if world.held == layout.goal_object else world.place
            assert carried_to is not None  # nothing can be held before a place was reached
            item, place = layout.objects[world.held], layout.places[carried_to]
            return self._reach(carried_to) or f"put {item} {layout.preposition(carried_to)} {place}"
        source = world.at[layout.goal_object]
        assert source is not None
        if self.seen[source]:
            return self._reach(source) or f"take {layout.objects[layout.goal_object]}"
        return self._reach(self._next_unseen())

    def _reach(self, place: int) -> str:
        """The command that brings the contents of `place` closer; "" when they are in reach."""
        name = self.world.layout.places[place]
        if self.world.place != place:
            return f"go to {name}"
        return "" if self.world.opened[place] else f"open {name}"

    def _next_unseen(self) -> int:
        goal_place = self.world.layout.goal_place
        unseen = [i for i, seen in enumerate(self.seen) if not seen and i != goal_place]
        here = self.world.place
        return here if here in unseen else unseen[0]


def random_command(layout: Layout, rng: random.Random) -> str:
    """Any well-formed command about this game's things, sensible or not."""
    place = rng.randrange(len(layout.places))
    item = rng.choice(layout.objects)
    verb = rng.choice(("go", "open", "take", "put"))
    name = layout.places[place]
    if verb == "put":
        return f"put {item} {layout.preposition(place)} {name}"
    return {"go": f"go to {name}", "open": f"open {name}", "take": f"take {item}"}[verb]
