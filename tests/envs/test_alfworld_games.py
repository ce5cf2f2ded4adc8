"""Finding games on disk in both layouts, and what is said when they are missing or broken."""

import json
import lzma
from pathlib import Path

import pytest

from capo.envs.alfworld.games import FAMILIES, Game, data_folder, read_games
from capo.envs.alfworld.tasks import pack, unpack
from capo.protocol.errors import ConfigError, EnvError
from capo.protocol.records import Task
from tests.envs import textworld_games
from tests.envs.small_house import problem
from tests.envs.textworld_games import RealGame

SMALL = RealGame(
    "pick_and_place_simple-Mug-None-Shelf-1/trial_1", "put a mug.", problem(), ("look",)
)


def write_official(root: Path, game: RealGame, split: str = "train", **changes: object) -> Path:
    path = root / "json_2.1.1" / split / game.id / "game.tw-pddl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(textworld_games.game_file(game) | changes))
    return path


def write_compact(path: Path, games: list[dict[str, object]]) -> None:
    with lzma.open(path, "wt") as lines:
        lines.writelines(json.dumps(game) + "\n" for game in games)


def compact(game: RealGame) -> dict[str, object]:
    return {"id": game.id, "task": game.task, "pddl_problem": game.problem, "walkthrough": []}


def test_both_layouts_give_the_same_games_in_the_same_order(tmp_path: Path) -> None:
    real = textworld_games.some_of_each_family(textworld_games.valid_seen(), 2)
    for game in real:
        write_official(tmp_path, game, "valid_seen")
    official = read_games(tmp_path, "valid_seen")
    kept = {game.id for game in official}
    compacted = [g for g in read_games(textworld_games.data(), "valid_seen") if g.id in kept]
    assert official == compacted
    assert {game.family for game in official} == set(FAMILIES)
    assert kept == {game.id for game in real}
    assert {game.id: game.task for game in real} == {game.id: game.task for game in official}
    assert all(game.walkthrough for game in official)


def test_the_folder_of_the_splits_may_be_given_itself(tmp_path: Path) -> None:
    write_official(tmp_path, SMALL)
    assert read_games(tmp_path / "json_2.1.1", "train") == read_games(tmp_path, "train")


def test_the_order_mixes_families_and_does_not_depend_on_the_file(tmp_path: Path) -> None:
    games = list(textworld_games.valid_seen())
    first = [game.family for game in read_games(textworld_games.data(), "valid_seen")[:40]]
    assert set(first) == set(FAMILIES)
    write_compact(tmp_path / "a.jsonl.xz", [compact(game) for game in games[:9]])
    write_compact(tmp_path / "b.jsonl.xz", [compact(game) for game in reversed(games[:9])])
    assert read_games(tmp_path, "a") == read_games(tmp_path, "b")


def test_a_choice_of_families_is_kept_to() -> None:
    games = read_games(textworld_games.data(), "valid_seen", ("pick_heat_then_place_in_recep",))
    assert len(games) == 16
    assert {game.family for game in games} == {"pick_heat_then_place_in_recep"}


def test_unsolvable_and_unsupported_games_are_left_out(tmp_path: Path) -> None:
    write_official(tmp_path, SMALL)
    unmarked = write_official(tmp_path, SMALL._replace(id="pick_and_place_simple-A-None-B-1/t"))
    content = json.loads(unmarked.read_text())
    del content["solvable"]
    unmarked.write_text(json.dumps(content))
    write_official(
        tmp_path, SMALL._replace(id="pick_and_place_simple-C-None-D-1/t"), solvable=False
    )
    for task in (
        "pick_and_place_with_movable_recep-Mug-Pan-Shelf-1",
        "pick_heat_then_place_in_recep-AppleSliced-None-Fridge-1",
        "another_family-Mug-None-Shelf-1",
    ):
        write_official(tmp_path, SMALL._replace(id=f"{task}/trial_1"))
    (tmp_path / "json_2.1.1/train/pick_and_place_simple-E-None-F-1/no_game").mkdir(parents=True)
    assert [game.id for game in read_games(tmp_path, "train")] == [SMALL.id]


def test_a_task_sentence_may_hold_quotes(tmp_path: Path) -> None:
    game = SMALL._replace(task='put the \\"best\\" mug on the shelf: now.')
    write_official(tmp_path, game)
    (read,) = read_games(tmp_path, "train")
    assert read.task == 'put the "best" mug on the shelf: now.'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a readable game"),
        (b'{"pddl_problem": "(de', "is not a readable game"),
        (b'{"grammar": "", "solvable": true}', "missing required field `pddl_problem`"),
        (b'{"pddl_problem": "\xff\xfe", "grammar": "", "solvable": true}', "is not a readable"),
        (b'{"pddl_problem": "(define", "grammar": "", "solvable": true}', "torn PDDL problem"),
    ],
)
def test_a_corrupt_game_file_is_named_with_a_remedy(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = write_official(tmp_path, SMALL)
    path.write_bytes(content)
    with pytest.raises(EnvError, match=said) as refused:
        read_games(tmp_path, "train")
    assert str(path) in str(refused.value)
    assert "alfworld-download" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_games_of_older_rules_are_refused(tmp_path: Path) -> None:
    grammar = str(textworld_games.game_file(SMALL)["grammar"])
    older = grammar.replace("move {o} to {r}", "put {o} in/on {r}")
    write_official(tmp_path, SMALL, grammar=older)
    with pytest.raises(EnvError, match=r"other rules \(no command 'move \{o\} to \{r\}'\)"):
        read_games(tmp_path, "train")


def test_a_game_without_a_task_is_refused(tmp_path: Path) -> None:
    grammar = str(textworld_games.game_file(SMALL)["grammar"])
    write_official(tmp_path, SMALL, grammar=grammar.replace("Your task is to", "You may"))
    with pytest.raises(EnvError, match="does not say what the task is"):
        read_games(tmp_path, "train")


def test_a_broken_compact_file_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl.xz"
    write_compact(path, [compact(SMALL), {"id": "x"}])
    with pytest.raises(EnvError, match=r"train\.jsonl\.xz line 2 is not a game"):
        read_games(tmp_path, "train")
    write_compact(path, [compact(SMALL)] * 3)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(EnvError, match=r"train\.jsonl\.xz is torn after line"):
        read_games(tmp_path, "train")
    path.write_bytes(b"not xz at all")
    with pytest.raises(EnvError, match=r"train\.jsonl\.xz is torn after line 0"):
        read_games(tmp_path, "train")
    write_compact(path, [compact(SMALL) | {"pddl_problem": "(:objects (:init) (:goal)"}])
    with pytest.raises(EnvError, match=r"train\.jsonl\.xz line 1 holds a torn PDDL problem"):
        read_games(tmp_path, "train")


def test_games_with_one_id_are_refused(tmp_path: Path) -> None:
    write_compact(tmp_path / "train.jsonl.xz", [compact(SMALL)] * 2)
    with pytest.raises(EnvError, match=f"two games with the id {SMALL.id}"):
        read_games(tmp_path, "train")


def test_missing_data_is_said_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    with pytest.raises(ConfigError, match=r"\$ALFWORLD_DATA.* not set.*alfworld-download"):
        data_folder("")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"gone is not a folder.*alfworld-download"):
        data_folder("")
    with pytest.raises(ConfigError, match=r"neither json_2\.1\.1/valid_unseen.*alfworld-download"):
        read_games(tmp_path, "valid_unseen")
    (tmp_path / "train").mkdir()
    with pytest.raises(ConfigError, match="train has no playable game"):
        read_games(tmp_path, "train")


def test_the_data_folder_may_be_written_with_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    assert (
        data_folder("") == data_folder("$ALFWORLD_DATA") == data_folder(str(tmp_path)) == tmp_path
    )


def test_a_task_carries_the_whole_game_in_few_bytes() -> None:
    real = textworld_games.valid_seen()[0]
    game = Game(real.id, real.task, real.problem, real.walkthrough)
    task = pack("valid", game)
    assert unpack(task) == game
    assert task.id == f"valid/{real.id}"
    assert len(task.payload) * 5 < len(real.problem)


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b"junk" + b, lambda b: b""])
def test_a_damaged_payload_is_refused(damage) -> None:
    task = pack("train", Game("x/y", "do.", problem()))
    with pytest.raises(EnvError, match="payload of task train/x/y"):
        unpack(Task(task.id, damage(task.payload)))


def test_a_payload_that_would_unpack_without_bound_is_refused() -> None:
    task = pack("train", Game("x/y", "do.", " " * (8 << 20)))
    with pytest.raises(EnvError, match="larger than 4 MiB"):
        unpack(task)
