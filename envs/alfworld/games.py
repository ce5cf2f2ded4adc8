"""Finds and reads ALFWorld games on disk, in either of two layouts.

- The official one: `SPLIT/TASK/TRIAL/game.tw-pddl`, where the folder of the splits is the data
  folder or its `json_2.1.1`. As ALFWorld does, it leaves out games of other families, with movable
  receptacles or sliced objects, and games that are not marked solvable.
- The compact one: `SPLIT.jsonl.xz`, a game a line: id, task, pddl_problem, walkthrough.

Rules and texts that a game file brings along are not run: they are ours (`world`). A file that was
written for other rules is refused.
"""

import lzma
import re
from collections.abc import Iterator
from hashlib import blake2b
from os.path import expandvars
from pathlib import Path

import msgspec
from msgspec import Struct

from capo.protocol.errors import ConfigError, EnvError

FAMILIES = (
    "look_at_obj_in_light",
    "pick_and_place_simple",
    "pick_clean_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_two_obj_and_place",
)
_DOWNLOAD = "download the games again with `alfworld-download` of alfworld 0.4"
_REBUILD = "fetch or build the file again"
_TASK = re.compile(r'"rhs"\s*:\s*("Your task is to: (?:[^"\\]|\\.)*")')
_COMMAND = re.compile(r'template\s*::\s*"([^"]*)"')
_KNOWN_COMMANDS = frozenset(("move {o} to {r}", "take {o} from {r}", "use {o}", "help"))


class Game(Struct, frozen=True):
    """One game: all that an environment needs, and how it can be won."""

    id: str  # TASK/TRIAL
    task: str
    problem: str  # PDDL
    walkthrough: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        return family_of(self.id)


class _CompactGame(Struct, frozen=True):
    id: str
    task: str
    pddl_problem: str
    walkthrough: tuple[str, ...] = ()


class _GameFile(Struct, frozen=True):
    pddl_problem: str
    grammar: str
    solvable: bool = False
    walkthrough: tuple[str, ...] | None = None


def family_of(game_id: str) -> str:
    return game_id.split("-", 1)[0]


def data_folder(configured: str) -> Path:
    """The folder that the configuration names; "" means $ALFWORLD_DATA."""
    configured = configured or "$ALFWORLD_DATA"
    text = expandvars(configured)
    if "$" in text:
        raise ConfigError(
            f"the data folder {configured!r} has an environment variable that is not set; set it "
            "to the folder of ALFWorld's games (`alfworld-download` fills it), or give "
            "environment.options.data"
        )
    folder = Path(text).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder; set $ALFWORLD_DATA or environment.options.data to the "
            "folder of ALFWorld's games (`alfworld-download` fills it)"
        )
    return folder


def read_games(folder: Path, split: str, families: tuple[str, ...] = FAMILIES) -> list[Game]:
    """The playable games of a split. The order mixes the families and depends on ids alone."""
    for found in (folder / "json_2.1.1" / split, folder / split):
        if found.is_dir():
            games = list(_read_official(found, families))
            break
    else:
        found = folder / f"{split}.jsonl.xz"
        if not found.is_file():
            raise ConfigError(
                f"{folder} has neither json_2.1.1/{split}, nor {split}, nor {split}.jsonl.xz; "
                "name another split in environment.options, or download the games with "
                "`alfworld-download`"
            )
        games = [game for game in _read_compact(found) if game.family in families]
    if not games:
        raise ConfigError(
            f"{found} has no playable game of the families {', '.join(families)}; choose other "
            "families, or download the games with `alfworld-download`"
        )
    ids = [game.id for game in games]
    if len(set(ids)) < len(ids):
        raise EnvError(f"{found} has two games with the id {max(ids, key=ids.count)}")
    return sorted(games, key=lambda game: blake2b(game.id.encode(), digest_size=8).digest())


def _read_official(split: Path, families: tuple[str, ...]) -> Iterator[Game]:
    for path in sorted(split.glob("*/*/game.tw-pddl")):
        trial = path.parent
        game_id = f"{trial.parent.name}/{trial.name}"
        if family_of(game_id) not in families or "movable" in game_id or "Sliced" in game_id:
            continue
        try:
            file = msgspec.json.decode(path.read_bytes(), type=_GameFile)
        except (OSError, msgspec.DecodeError) as error:
            raise EnvError(f"{path} is not a readable game ({error}); {_DOWNLOAD}") from error
        if not file.solvable:
            continue
        _check_problem(file.pddl_problem, str(path), _DOWNLOAD)
        if missing := _KNOWN_COMMANDS - set(_COMMAND.findall(file.grammar)):
            raise EnvError(
                f"{path} was made for other rules (no command {min(missing)!r}); {_DOWNLOAD}"
            )
        task = _TASK.search(file.grammar)
        if task is None:
            raise EnvError(f"{path} does not say what the task is; {_DOWNLOAD}")
        sentence = msgspec.json.decode(task[1], type=str).removeprefix("Your task is to: ")
        yield Game(game_id, sentence, file.pddl_problem, file.walkthrough or ())


def _read_compact(path: Path) -> Iterator[Game]:
    decoder = msgspec.json.Decoder(_CompactGame)
    number = 0
    try:
        with lzma.open(path) as lines:
            for number, line in enumerate(lines, start=1):
                game = decoder.decode(line)
                _check_problem(game.pddl_problem, f"{path} line {number}", _REBUILD)
                yield Game(game.id, game.task, game.pddl_problem, game.walkthrough)
    except msgspec.DecodeError as error:
        raise EnvError(f"{path} line {number} is not a game ({error}); {_REBUILD}") from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise EnvError(f"{path} is torn after line {number} ({error}); {_REBUILD}") from error


def _check_problem(problem: str, where: str, remedy: str) -> None:
    """The cheap part of reading, so that a torn file is found before anything is played."""
    torn = problem.count("(") != problem.count(")")
    if torn or not all(section in problem for section in (":objects", ":init", ":goal")):
        raise EnvError(f"{where} holds a torn PDDL problem; {remedy}")
