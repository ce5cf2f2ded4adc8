"""The checker finds what it is there for: a good run, damaged in one way at a time."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.checker import Findings, check
from tests.chaos.fleet import Fleet
from tests.chaos.storm import METHODS

GROUP = 4


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    with Fleet(folder, 0, METHODS["grpo"]) as fleet:
        for _ in range(2):
            fleet.add_actor()
        fleet.wait_for_updates(4, limit_s=180)
        assert fleet.end() == 130
    assert examine(folder).faults == []
    return folder


def examine(folder: Path) -> Findings:
    return check(folder / "run", folder / "logs", batch=12, group_size=GROUP, staleness=1)


def sql(statement: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        with sqlite3.connect(folder / "run" / "run.sqlite") as database:
            assert database.execute(statement).rowcount > 0
        database.close()

    return damage


def train_an_episode_twice(folder: Path) -> None:
    with sqlite3.connect(folder / "run" / "run.sqlite") as database:
        (first,) = database.execute("SELECT episode_ids FROM updates WHERE version = 0").fetchone()
        (second,) = database.execute("SELECT episode_ids FROM updates WHERE version = 1").fetchone()
        names = [json.loads(first)[0], *json.loads(second)[1:]]
        database.execute(
            "UPDATE updates SET episode_ids = ? WHERE version = 1", (json.dumps(names),)
        )
    database.close()


def edit_log(pattern: str, edit: Callable[[list[dict]], list[dict]]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = max((folder / "logs").glob(pattern), key=lambda log: log.stat().st_size)
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in edit(lines)))

    return damage


def forget_a_delivery(lines: list[dict]) -> list[dict]:
    (first, *_) = (line for line in lines if line["event"] == "delivery")
    return [line for line in lines if line is not first]


def weights_backwards(lines: list[dict]) -> list[dict]:
    weights = [line for line in lines if line["event"] == "weights"]
    others = [line for line in lines if line["event"] != "weights"]
    assert len({line["version"] for line in weights}) > 1
    return [*others, *reversed(weights)]


def other_weights(lines: list[dict]) -> list[dict]:
    for line in lines:
        if line["event"] == "weights":
            line["checksum"] = "another"
    return lines


LAST = "(SELECT MAX(version) FROM updates)"
DAMAGES = [
    ("DELETE FROM steps WHERE rowid = (SELECT MIN(rowid) FROM steps)", "not in the run file"),
    ("UPDATE steps SET action = x'00' WHERE rowid = 1", "have another action"),
    ("UPDATE steps SET episode_id = 'x' WHERE rowid = 1", "never sent"),
    ("UPDATE episodes SET consumed_by = NULL WHERE consumed_by = 0", "update 0 trained on"),
    ("UPDATE episodes SET status = 'env_error' WHERE consumed_by = 0", "update 0 trained on"),
    (f"UPDATE episodes SET min_version = -5 WHERE consumed_by = {LAST}", "began at version"),
    ("UPDATE leases SET group_id = 'x' WHERE rowid = 1", "has group"),
    ("DELETE FROM updates WHERE version = 1", "with gaps"),
    ("UPDATE leases SET attempt = 3 WHERE rowid = 1", "has the attempts"),
    ("UPDATE leases SET status = 'playing' WHERE rowid = 1", "ends as playing"),
    ("UPDATE episodes SET excluded = 'flat' WHERE consumed_by = 0", "trained on"),
    ("UPDATE steps SET min_version = -1 WHERE step_index = 1", "goes from version"),
]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        *((sql(statement), sentence) for statement, sentence in DAMAGES),
        (train_an_episode_twice, "trained in two updates"),
        (edit_log("*.wire", forget_a_delivery), "acked but never sent"),
        (edit_log("*.engine", weights_backwards), "weights went from version"),
        (edit_log("*.engine", other_weights), "two different weights"),
        (lambda folder: (folder / "run" / "metrics.jsonl").write_text(""), "metrics.jsonl has 0"),
    ],
    ids=[*(sentence + f" {i}" for i, (_, sentence) in enumerate(DAMAGES)), *"abcde"],
)
def test_every_damage_is_found(
    recorded: Path, tmp_path: Path, damage: Callable[[Path], object], sentence: str
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(recorded, folder)
    damage(folder)
    assert any(sentence in fault for fault in examine(folder).faults), examine(folder)
