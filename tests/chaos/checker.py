"""Reads a run file and the actors' logs after the storm, and says what was lost or doubled.

Independent: plain SQL on the run file and the lines that the wire and the engines wrote; nothing of
the learner's code. `python -m tests.chaos.checker RUN LOGS` checks a run again.
"""

import json
import sqlite3
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.wire import digest

FAILED = ("lost", "unreceived", "env_error", "engine_error", "incomplete", "empty")
TRAINED = ("terminated", "truncated")


@dataclass
class Findings:
    figures: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def require(self, condition: bool, sentence: str) -> None:
        if not condition:
            self.faults.append(sentence)

    def __str__(self) -> str:
        lines = [f"{name}: {value}" for name, value in self.figures.items()]
        return "\n".join([*lines, *(f"FAULT: {fault}" for fault in self.faults)])


def check(run_dir: Path, logs: Path, *, batch: int, group_size: int, staleness: int) -> Findings:
    found = Findings()
    database = sqlite3.connect(run_dir / "run.sqlite")
    verdict = database.execute("PRAGMA integrity_check").fetchall()
    found.require(verdict == [("ok",)], f"the run file is damaged: {verdict}")
    _check_acked(database, logs, found)
    _check_updates(database, run_dir, found, batch, group_size, staleness)
    _check_leases(database, found, group_size)
    _check_versions(database, logs, found)
    return found


def _check_acked(database: sqlite3.Connection, logs: Path, found: Findings) -> None:
    """Every acked step is there exactly once, as it was sent; nothing is there that nobody sent."""
    stored = Counter[tuple[str, int]]()
    actions = {}
    for episode, index, action in database.execute(
        "SELECT episode_id, step_index, action FROM steps"
    ):
        stored[episode, index] += 1
        actions[episode, index] = digest(action)
    ended = Counter(name for (name,) in database.execute("SELECT episode_id FROM episodes"))
    sent = set()
    num_acked = num_ends = num_deliveries = 0
    lost = doubled = altered = 0
    for path in sorted(logs.glob("*.wire")):
        deliveries: dict[int, tuple[list, list]] = {}
        acked = 0
        for line in _lines(path):
            if line["event"] == "ack":
                acked = max(acked, line["sequence"])
            elif line["event"] == "delivery":
                content = (line["steps"], line["ends"])
                sent |= {(episode, index) for episode, index, _ in line["steps"]}
                before = deliveries.setdefault(line["sequence"], content)
                found.require(
                    before == content,
                    f"{path.name}: delivery {line['sequence']} was sent with two contents",
                )
        num_deliveries += len(deliveries)
        missing = [number for number in range(1, acked + 1) if number not in deliveries]
        found.require(not missing, f"{path.name}: acked but never sent: {missing[:5]}")
        for number in range(1, acked + 1):
            steps, ends = deliveries.get(number, ([], []))
            for episode, index, action in steps:
                num_acked += 1
                lost += stored[episode, index] == 0
                doubled += stored[episode, index] > 1
                altered += stored[episode, index] > 0 and actions[episode, index] != action
            for episode, _ in ends:
                num_ends += 1
                lost += ended[episode] == 0
                doubled += ended[episode] > 1
    invented = [key for key in stored if key not in sent]
    found.figures |= {
        "deliveries": num_deliveries,
        "steps acked": num_acked,
        "ends acked": num_ends,
        "lost": lost,
        "doubled": doubled,
    }
    found.require(num_acked > 0, "no step was acked at all")
    found.require(lost == 0, f"{lost} acked records are not in the run file")
    found.require(doubled == 0, f"{doubled} acked records are there more than once")
    found.require(altered == 0, f"{altered} acked steps have another action in the run file")
    found.require(not invented, f"in the run file but never sent: {invented[:5]}")


def _check_updates(
    database: sqlite3.Connection,
    run_dir: Path,
    found: Findings,
    batch: int,
    group_size: int,
    staleness: int,
) -> None:
    """No episode is in two updates; batches are full, young enough, and of whole groups."""
    episodes = {
        row[0]: row[1:]
        for row in database.execute(
            "SELECT episode_id, status, excluded, min_version, consumed_by FROM episodes"
        )
    }
    members = {
        row[0]: row[1:]
        for row in database.execute("SELECT episode_id, group_id, member, task_id FROM leases")
    }
    trained = Counter[str]()
    done = []
    for version, status, names in database.execute(
        "SELECT version, status, episode_ids FROM updates ORDER BY version"
    ):
        names = json.loads(names)
        trained.update(names)
        if status == "done":
            done.append(version)
        found.require(len(names) == batch, f"update {version} took {len(names)} episodes")
        groups = defaultdict(list)
        for name in names:
            ending, excluded, min_version, consumed_by = episodes[name]
            groups[members[name][0]].append(members[name][1:])
            found.require(
                ending in TRAINED and excluded == "" and consumed_by == version,
                f"update {version} trained on {name}: {episodes[name]}",
            )
            found.require(
                version - min_version <= staleness,
                f"update {version} trained on {name}, which began at version {min_version}",
            )
        for group, places in groups.items():
            whole = sorted(member for member, _ in places) == list(range(group_size))
            found.require(
                whole and len({task for _, task in places}) == 1,
                f"update {version} has group {group} with {sorted(places)}",
            )
    _check_flat(database, found, members, group_size)
    twice = [name for name, count in trained.items() if count > 1]
    found.require(not twice, f"trained in two updates: {twice[:5]}")
    found.require(done == list(range(len(done))), f"updates are done with gaps: {done[-20:]}")
    metrics = [line["version"] for line in _lines(run_dir / "metrics.jsonl")]
    found.require(
        metrics == [version + 1 for version in done],
        f"metrics.jsonl has {len(metrics)} lines for {len(done)} updates: {metrics[-5:]}",
    )
    found.figures |= {"updates": len(done), "episodes trained": sum(trained.values())}
    found.require(len(done) > 0, "no update was done at all")


def _check_flat(
    database: sqlite3.Connection, found: Findings, members: dict, group_size: int
) -> None:
    """What was replaced as flat were whole groups of equal returns."""
    replaced = defaultdict(list)
    for name, total in database.execute(
        "SELECT episode_id, episode_return FROM episodes WHERE excluded = 'flat'"
    ):
        replaced[members[name][0]].append(total)
    for group, returns in replaced.items():
        found.require(
            len(returns) == group_size > 1 and max(returns) - min(returns) < 1e-6,
            f"group {group} was replaced as flat with the returns {returns}",
        )
    found.figures["flat groups replaced"] = len(replaced)


def _check_leases(database: sqlite3.Connection, found: Findings, group_size: int) -> None:
    """Every lease came to an end that is known, and no number of the order was left out."""
    attempts = defaultdict(list)
    numbers = set()
    for lease, attempt, number, status in database.execute(
        "SELECT lease_id, attempt, number, status FROM leases WHERE purpose = 'train' "
        "ORDER BY lease_id, attempt"
    ):
        attempts[lease].append((attempt, status))
        numbers.add(number)
    outcome = Counter[str]()
    for lease, tries in attempts.items():
        found.require(
            [attempt for attempt, _ in tries] == list(range(1, len(tries) + 1)),
            f"lease {lease} has the attempts {tries}",
        )
        for attempt, status in tries[:-1]:
            found.require(
                status in FAILED, f"lease {lease} was reissued after attempt {attempt}: {status}"
            )
        last = tries[-1][1]
        found.require(
            last in (*TRAINED, *FAILED, "closed"), f"lease {lease} ends as {last}: {tries}"
        )
        outcome["completed" if last in TRAINED else last] += 1
    expected = set(range((max(numbers) // group_size + 1) * group_size))
    skipped = sorted(expected - numbers)
    last_group = max(numbers) // group_size
    found.require(
        all(number // group_size >= last_group - 64 // group_size for number in skipped),
        f"leases were never handed out: {skipped[:5]}",
    )
    reissued = sum(len(tries) - 1 for tries in attempts.values())
    found.figures |= {"leases": len(attempts), "reissued": reissued}
    found.figures |= {f"leases {name}": count for name, count in sorted(outcome.items())}


def _check_versions(database: sqlite3.Connection, logs: Path, found: Findings) -> None:
    """An engine's weights never go back, by its own word (scripted ones) and by what it reported,
    and neither do the versions inside an episode."""
    num_broadcasts = 0
    checksums: dict[int, set[str]] = defaultdict(set)
    for path in sorted([*logs.glob("*.engine"), *logs.glob("*.wire")]):
        before = -1
        for line in _lines(path):
            if line["event"] == "weights":
                num_broadcasts += path.suffix == ".wire"
                checksums[line["version"]].add(line["checksum"])
                found.require(
                    line["version"] >= before,
                    f"{path.name}: weights went from version {before} to {line['version']}",
                )
                before = line["version"]
    unlike = [version for version, sums in checksums.items() if len(sums) > 1]
    found.require(not unlike, f"versions with two different weights: {unlike[:5]}")
    before = ("", -1)
    for episode, _, low, high in database.execute(
        "SELECT episode_id, step_index, min_version, max_version FROM steps "
        "ORDER BY episode_id, step_index"
    ):
        found.require(
            episode != before[0] or low >= before[1],
            f"episode {episode} goes from version {before[1]} to {low}",
        )
        before = (episode, high)
    found.figures["weights received"] = num_broadcasts


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


if __name__ == "__main__":
    config = json.loads(
        sqlite3.connect(Path(sys.argv[1]) / "run.sqlite")
        .execute("SELECT value FROM run WHERE key = 'config'")
        .fetchone()[0]
    )
    outcome = check(
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        batch=config["learner"]["batch_episodes"],
        group_size=config["scheduler"]["group_size"],
        staleness=config["scheduler"]["max_staleness"],
    )
    print(outcome)
    sys.exit(bool(outcome.faults))
