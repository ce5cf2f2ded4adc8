"""The state of one game and its rules: which commands are admissible, what they change and say.

The rules are those of the ALFRED domain of TextWorld's ALFWorld games, specialised by hand. What
holds there by accident holds here too: an object can be examined only while it is held, opening
is not needed to heat, cool, clean or switch on, and an object may lie in two receptacles at once.
"""

from collections import defaultdict
from hashlib import blake2b
from typing import NamedTuple

from capo.envs.alfworld import text
from capo.envs.alfworld.goal import is_reached
from capo.envs.alfworld.house import CLEANERS, COOLERS, HEATERS, KNIVES, build_house
from capo.envs.alfworld.problem import Atom, read_problem

_STATES = {
    "clean": "isclean",
    "hot": "ishot",
    "cool": "iscool",
    "sliced": "issliced",
    "toggled": "istoggled",
}


class _Deed(NamedTuple):
    """A command with its meaning: `thing` and `other` are identifiers, "" where there is none."""

    verb: str
    thing: str = ""
    other: str = ""


class World:
    """`introduction` is the first text, `commands` what is admissible now, in the game's order."""

    def __init__(self, problem: str, task: str) -> None:
        house = build_house(read_problem(problem))
        self._house = house
        self._facts: set[Atom] = set(house.start)
        self._inside: dict[str, set[str]] = defaultdict(set)  # receptacle -> objects
        for predicate, *arguments in house.start:
            if predicate == "inreceptacle":
                self._inside[arguments[1]].add(arguments[0])
        self._held = [fact[2] for fact in sorted(house.start) if fact[0] == "holds"]
        (self._place,) = (fact[2] for fact in house.start if fact[0] == "atlocation")
        self._refresh()
        scene = self._look() if self._here else text.room(self._names(house.receptacles))
        self.introduction = text.introduction(scene, task)

    @property
    def won(self) -> bool:
        return is_reached(self._house.goal, self._facts)

    @property
    def state_key(self) -> str:
        """Equal for equal states of one game: a digest of what differs from its beginning."""
        difference = sorted(self._facts ^ self._house.start)
        return blake2b(repr(difference).encode(), digest_size=12).hexdigest()

    def step(self, command: str) -> str:
        """Do it and say what is seen. A command that is not admissible changes nothing."""
        deed = self._deeds.get(command.strip())
        if deed is None:
            return text.NOTHING_HAPPENS
        said = self._do(deed)
        self._refresh()
        return said

    def _refresh(self) -> None:
        self._here = self._house.at_place.get(self._place, ())
        self._deeds = self._admissible()
        self.commands = tuple(sorted(self._deeds))

    def _names(self, things: tuple[str, ...] | list[str]) -> list[str]:
        return [self._house.names[thing] for thing in things]

    def _contents(self, receptacle: str) -> list[str]:
        return self._names(sorted(self._inside[receptacle]))

    def _is_accessible(self, receptacle: str) -> bool:
        return (
            receptacle not in self._house.can["openable"] or ("opened", receptacle) in self._facts
        )

    def _admissible(self) -> dict[str, _Deed]:
        names = self._house.names
        deeds = {verb: _Deed(verb) for verb in ("look", "inventory", "help")}
        for receptacle, places in self._house.places.items():
            if any(place != self._place for place in places):
                deeds[f"go to {names[receptacle]}"] = _Deed("go", receptacle)
        for held in self._held:
            deeds[f"examine {names[held]}"] = _Deed("examine object", held)
            self._add_cutting(deeds, held)
        for receptacle in self._here:
            self._add_at_receptacle(deeds, receptacle)
        return deeds

    def _add_at_receptacle(self, deeds: dict[str, _Deed], receptacle: str) -> None:
        house, names = self._house, self._house.names
        name = names[receptacle]
        deeds[f"examine {name}"] = _Deed("examine receptacle", receptacle)
        if receptacle in house.can["openable"]:
            verb = "close" if ("opened", receptacle) in self._facts else "open"
            deeds[f"{verb} {name}"] = _Deed(verb, receptacle)
        accessible = self._is_accessible(receptacle)
        hands_free = ("holdsany", house.agent) not in self._facts
        for thing in self._inside[receptacle]:
            if thing in house.can["toggleable"]:
                deeds[f"use {names[thing]}"] = _Deed("use", thing)
            if accessible and hands_free and thing in house.can["pickupable"]:
                deeds[f"take {names[thing]} from {name}"] = _Deed("take", thing, receptacle)
        types = house.types.get(receptacle, frozenset())
        for held in self._held:
            if accessible and (receptacle, held) in house.accepts:
                deeds[f"move {names[held]} to {name}"] = _Deed("move", held, receptacle)
            for verb, appliances, ability in (
                ("clean", CLEANERS, "cleanable"),
                ("heat", HEATERS, "heatable"),
                ("cool", COOLERS, "coolable"),
            ):
                if held in house.can[ability] and not appliances.isdisjoint(types):
                    deeds[f"{verb} {names[held]} with {name}"] = _Deed(verb, held, receptacle)

    def _add_cutting(self, deeds: dict[str, _Deed], knife: str) -> None:
        if KNIVES.isdisjoint(self._house.types.get(knife, ())):
            return
        for thing in self._house.can["sliceable"]:
            if ("objectatlocation", thing, self._place) in self._facts:
                command = f"slice {self._house.names[thing]} with {self._house.names[knife]}"
                deeds[command] = _Deed("slice", thing, knife)

    def _do(self, deed: _Deed) -> str:
        names, facts = self._house.names, self._facts
        verb, thing, other = deed
        match verb:
            case "look":
                return self._look()
            case "inventory":
                return text.carrying(self._names(self._held))
            case "help":
                return text.help_text()
            case "examine receptacle":
                return self._examine_receptacle(thing)
            case "examine object":
                return self._examine_object(thing)
            case "go":
                self._go(thing)
                return f"You arrive at {names[thing]}. {self._examine_receptacle(thing)}"
            case "open":
                facts.add(("opened", thing))
                return f"You open the {names[thing]}. {self._examine_receptacle(thing)}"
            case "close":
                facts.discard(("opened", thing))
                return f"You close the {names[thing]}."
            case "take":
                self._take(thing, other)
                return f"You pick up the {names[thing]} from the {names[other]}."
            case "move":
                self._put(thing, other)
                return f"You move the {names[thing]} to the {names[other]}."
            case "clean":
                facts.add(("isclean", thing))
            case "heat":
                facts.add(("ishot", thing))
                facts.discard(("iscool", thing))
            case "cool":
                facts.add(("iscool", thing))
                facts.discard(("ishot", thing))
            case "slice":
                facts.add(("issliced", thing))
                return f"You sliced the {names[thing]} with the {names[other]}."
            case "use":
                facts.symmetric_difference_update((("ison", thing),))
                facts.add(("istoggled", thing))
                # "Toggled" never ends, so the game always speaks of turning it on.
                return f"You turn on the {names[thing]}."
        return f"You {verb} the {names[thing]} using the {names[other]}."

    def _go(self, receptacle: str) -> None:
        place = next(at for at in self._house.places[receptacle] if at != self._place)
        self._facts.discard(("atlocation", self._house.agent, self._place))
        self._facts.add(("atlocation", self._house.agent, place))
        self._place = place

    def _take(self, thing: str, receptacle: str) -> None:
        agent = self._house.agent
        self._inside[receptacle].discard(thing)
        self._held.append(thing)
        self._facts.discard(("inreceptacle", thing, receptacle))
        self._facts.discard(("objectatlocation", thing, self._place))
        self._facts.update(
            (("holds", agent, thing), ("holdsany", agent), ("taken", thing, receptacle))
        )

    def _put(self, thing: str, receptacle: str) -> None:
        agent = self._house.agent
        self._inside[receptacle].add(thing)
        self._held.remove(thing)
        self._facts.difference_update(
            (("holds", agent, thing), ("holdsany", agent), ("taken", thing, receptacle))
        )
        self._facts.update(
            (("inreceptacle", thing, receptacle), ("objectatlocation", thing, self._place))
        )

    def _look(self) -> str:
        if not self._here:
            return text.room(())  # what one sees from the middle of the room is told once only
        beside = sorted(
            (thing, receptacle)
            for predicate, thing, *where in self._facts
            if predicate == "objectatlocation" and where == [self._place]
            for receptacle in self._here
            # Only what was taken out of a receptacle is known to be beside it.
            if ("taken", thing, receptacle) in self._facts
        )
        return text.place(self._names(self._here), self._names([thing for thing, _ in beside]))

    def _examine_receptacle(self, receptacle: str) -> str:
        name, contents = self._house.names[receptacle], self._contents(receptacle)
        if receptacle not in self._house.can["openable"]:
            return text.surface(name, contents)
        if ("opened", receptacle) in self._facts:
            return text.opened(name, contents)
        return text.closed(name)

    def _examine_object(self, thing: str) -> str:
        name = self._house.names[thing]
        if thing in self._house.can["isreceptacleobject"]:
            return text.container(name, self._names(self._house.inner.get(thing, ())))
        states = {word for word, fact in _STATES.items() if (fact, thing) in self._facts}
        return text.condition(name, states)
