"""Layouts of the household world: what stands where, and what is asked. Drawn from a seed.

Knows no rules and no text. Nothing here iterates over a set, so a layout depends on the seed and
the options alone, never on PYTHONHASHSEED.
"""

import hashlib
import random

import msgspec
from msgspec import Struct

from capo.envs.api import Split

SURFACES = ("bed", "bench", "counter", "desk", "shelf", "table")
CONTAINERS = ("box", "cabinet", "drawer", "fridge")
OBJECTS = ("apple", "book", "bowl", "cup", "key", "lamp", "pen", "spoon")


class Layout(Struct, frozen=True, array_like=True):
    """One game. Indices point into `places` and `objects`; containers start closed."""

    places: tuple[str, ...]
    objects: tuple[str, ...]
    at: tuple[int, ...]  # the place of every object at the start
    goal_object: int
    goal_place: int  # never where the goal's object starts

    def preposition(self, place: int) -> str:
        return "in" if self.is_container(place) else "on"

    def is_container(self, place: int) -> bool:
        return self.places[place] in CONTAINERS


def draw_layout(
    rng: random.Random, *, num_places: int, num_containers: int, num_objects: int
) -> Layout:
    """Draws names, positions and goal uniformly; `num_containers` of the places can be closed."""
    containers = rng.sample(CONTAINERS, num_containers)
    places = [*rng.sample(SURFACES, num_places - num_containers), *containers]
    rng.shuffle(places)
    objects = sorted(rng.sample(OBJECTS, num_objects))
    at = tuple(rng.randrange(num_places) for _ in objects)
    goal_object = rng.randrange(num_objects)
    goal_place = (at[goal_object] + rng.randrange(1, num_places)) % num_places
    return Layout(tuple(places), tuple(objects), at, goal_object, goal_place)


def encode(layout: Layout) -> bytes:
    return msgspec.msgpack.encode(layout)


def decode(payload: bytes) -> Layout:
    return msgspec.msgpack.decode(payload, type=Layout)


def digest(payload: bytes) -> str:
    """Names a layout: equal for equal layouts, on every machine."""
    return hashlib.blake2b(payload, digest_size=12).hexdigest()


def split_of(layout_digest: str) -> Split:
    """The one split a layout belongs to: 80 % train, 10 % valid, 10 % test, by its digest."""
    tenth = int(layout_digest[:8], 16) % 10
    return "train" if tenth < 8 else "valid" if tenth == 8 else "test"
