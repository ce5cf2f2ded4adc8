"""Faults in random order against one run, and the checker's verdict afterwards.

`python -m tests.chaos.storm --minutes 10 --seed 1` is `make chaos`; the suite runs a short one.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.chaos.checker import Findings, check
from tests.chaos.fleet import HOPELESS_S, Fleet

NUM_ACTORS = 3
PHASES = ("ingest", "update", "checkpoint", "broadcast")
ACTOR_FAULTS = ("kill_actor", "freeze_actor", "cut_actor", "tear_message", "disturb")
KINDS = (
    *("actor killed -9", "actor frozen", "network cut", "message truncated", "network disturbed"),
    *(f"learner killed -9 in {phase}" for phase in PHASES),
)
SPOILED = ("dropped", "doubled", "reordered", "delayed")
METHODS = {
    "capo": ('algorithm.preset="capo"',),
    "grpo": ('algorithm.preset="grpo"', "scheduler.group_size=4"),
    "dapo": ('algorithm.preset="dapo"', "scheduler.group_size=4"),  # replaces flat groups
}


def storm(
    folder: Path, method: str, *, seconds: float, min_learner_kills: int, seed: int
) -> tuple[Findings, Fleet]:
    """A run in a storm of about `seconds`, and what the checker found afterwards."""
    with Fleet(folder, seed, METHODS[method]) as fleet:
        for _ in range(NUM_ACTORS):
            fleet.add_actor()
        fleet.wait_for_updates(3, limit_s=180)
        torment(fleet, seconds=seconds, min_learner_kills=min_learner_kills, seed=seed)
        fleet.wait(fleet.settled, "the leases of dead actors were given to others")
        code = fleet.end()
        found = check(
            fleet.run_dir,
            fleet.logs,
            batch=12,
            group_size=1 if method == "capo" else 4,
            staleness=1,
        )
        found.require(code == 130, f"the learner ended with exit code {code} after SIGINT")
        for kind in KINDS:
            found.require(fleet.injected[kind] > 0, f"it never happened: {kind}")
        found.figures |= {
            **fleet.injected,
            **{f"messages {name}": count for name, count in fleet.messages_spoiled().items()},
            "resumes": fleet.resumes,
        }
    return found, fleet


def torment(
    fleet: Fleet, *, seconds: float, min_learner_kills: int, seed: int, limit_s: float = HOPELESS_S
) -> None:
    """Every fault kind and phase at least once, in random order, for about `seconds`. The run must
    make an update within `limit_s` after each."""
    rng = random.Random(seed)
    deadline = time.monotonic() + seconds
    kills = 0
    phases, faults = [], []
    while time.monotonic() < deadline or kills < min_learner_kills:
        faults = faults or rng.sample(ACTOR_FAULTS, len(ACTOR_FAULTS))
        getattr(fleet, faults.pop())()
        fleet.look()
        phases = phases or rng.sample(PHASES, len(PHASES))
        fleet.kill_learner(phases.pop())
        kills += 1
        fleet.wait_for_updates(rng.randint(1, 4), limit_s)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=16, help="of the learner, per method")
    parser.add_argument("--keep", type=Path, help="a folder for the runs and logs")
    arguments = parser.parse_args()
    failed = False
    spoiled = Counter[str]()
    with tempfile.TemporaryDirectory(prefix="capo-chaos-") as scratch:
        for method in METHODS:
            folder = (arguments.keep or Path(scratch)) / method
            found, fleet = storm(
                folder,
                method,
                seconds=60 * arguments.minutes / len(METHODS),
                min_learner_kills=arguments.kills,
                seed=arguments.seed,
            )
            print(f"{method}, seed {arguments.seed}\n{found}\n", flush=True)
            failed = failed or bool(found.faults)
            spoiled.update(fleet.messages_spoiled())
    never = [kind for kind in SPOILED if not spoiled[kind]]
    if never:
        print(f"FAULT: no message was ever {', '.join(never)}")
        failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
