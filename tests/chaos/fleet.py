"""A learner and its actors as processes, each actor behind a wire of its own, to be tormented."""

import os
import random
import shutil
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from capo.launch.processes import free_port
from tests.chaos import scripted_actor
from tests.chaos.processes import ROOT, Forked, Spawned, capo
from tests.chaos.wire import Rates, Wire

CONFIG = ROOT / "tests" / "chaos" / "chaos.toml"
DEAD_AFTER_S = 2.5  # as in chaos.toml
HOPELESS_S = 90.0  # without one update: the run hangs


def settings(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


@dataclass
class Actor:
    name: str
    process: Forked | Spawned
    wire: Wire
    stopped: bool = False
    doomed: bool = False  # the test expects it to end by itself
    spared: bool = False  # it is not killed, though all else may happen to it


class Fleet:
    """A context manager. Faults are methods; `injected` counts them."""

    def __init__(self, folder: Path, seed: int, overrides: Sequence[str] = ()) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True)
        self.injected: Counter[str] = Counter()
        self._spoiled: Counter[str] = Counter()  # messages, on the wires of actors that are gone
        self.actors: list[Actor] = []
        self.random = random.Random(seed)
        self._overrides = overrides
        chosen = dict(override.split("=", 1) for override in overrides)
        self.dead_after_s = float(chosen.get("network.dead_after_s", DEAD_AFTER_S))
        self._port = free_port()
        self._started = 0
        self.resumes = 0
        os.environ["CAPO_CACHE"] = str(folder / "cache")
        self.learner = self._start_learner()

    @property
    def address(self) -> str:
        """The learner's own, past all wires."""
        return f"tcp://127.0.0.1:{self._port}"

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_) -> None:
        for actor in self.actors:
            actor.process.kill()
            actor.wire.close()
        self.learner.kill()
        if os.environ.get("CAPO_CHAOS_KEEP") is None:
            shutil.rmtree(self.run_dir / "tensorboard", ignore_errors=True)

    def _start_learner(self) -> Forked:
        bind = f'network.bind="tcp://127.0.0.1:{self._port}"'
        if (self.run_dir / "run.sqlite").exists():
            self.resumes += 1
            arguments = ["learner", "--resume", str(self.run_dir), *settings(bind)]
        else:
            chosen = settings(f'run_dir="{self.run_dir}"', bind, *self._overrides)
            arguments = ["learner", str(CONFIG), *chosen]
        return Forked(self.logs / "learner.log", capo, arguments)

    def add_actor(self, **keywords) -> Actor:
        """An actor with a scripted engine, which is up at once."""
        return self._start_actor(
            lambda log, address, name: Forked(
                log,
                scripted_actor.run,
                address,
                name,
                str(log.with_suffix(".engine")),
                **{"token_s": 0.003, **keywords},
            )
        )

    def add_vllm_actor(self) -> Actor:
        """`capo actor` itself, with its vLLM engine; half a minute until that is up."""
        return self._start_actor(
            lambda log, address, name: Spawned(
                log, "actor", "--connect", address, "--name", name, "--capacity", "4"
            )
        )

    def _start_actor(self, start: Callable[[Path, str, str], Forked | Spawned]) -> Actor:
        name = f"actor-{self._started}"
        self._started += 1
        wire = Wire(name, self._port, self.logs / f"{name}.wire", seed=self._started)
        actor = Actor(name, start(self.logs / f"{name}.log", wire.address, name), wire)
        self.actors.append(actor)
        return actor

    # What is going on

    def query(self, sql: str) -> list[tuple]:
        """Rows of the run file, as anybody may read them while the learner writes."""
        path = self.run_dir / "run.sqlite"
        if not path.exists():
            return []
        database = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)
        try:
            return database.execute(sql).fetchall()
        except sqlite3.OperationalError:  # it is being made
            return []
        finally:
            database.close()

    def updates(self) -> int:
        """Finished updates."""
        return len(self.query("SELECT 1 FROM updates WHERE status = 'done'"))

    def updating(self) -> bool:
        return bool(self.query("SELECT 1 FROM updates WHERE status = 'taken'"))

    def broadcasting(self) -> bool:
        """Whether an engine was told to receive weights and has not reported on them yet."""
        return any(actor.wire.receiving for actor in self.actors)

    def ingesting(self) -> bool:
        """Whether something was delivered that is not acked yet."""
        return any(actor.wire.sent > actor.wire.acked for actor in self.actors)

    def saving(self) -> bool:
        return any((self.run_dir / "checkpoints").glob("*.tmp"))

    def wait(self, condition: Callable[[], bool], what: str, limit_s: float = HOPELESS_S) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            self.look()
            assert time.monotonic() < deadline, f"waited {limit_s} s until {what}\n{self.story()}"
            time.sleep(0.002)

    def wait_for_updates(self, more: int, limit_s: float = HOPELESS_S) -> None:
        goal = self.updates() + more
        deadline = time.monotonic() + limit_s
        while self.updates() < goal:
            self.look()
            assert time.monotonic() < deadline, f"no update {goal} in {limit_s} s\n{self.story()}"
            time.sleep(0.05)

    def look(self) -> None:
        """Nobody may end whom nobody killed."""
        assert self.learner.exit_code is None, f"the learner ended:\n{self.learner.tail()}"
        for actor in self.actors:
            code = None if actor.doomed else actor.process.exit_code
            assert code is None, f"{actor.name} ended with {code}:\n{actor.process.tail()}"

    def story(self) -> str:
        status = self.run_dir / "status.json"
        return "\n".join(
            [
                self.learner.tail(2000),
                status.read_text() if status.exists() else "no status",
                *(f"{actor.name}: {actor.process.tail(400)}" for actor in self.actors),
            ]
        )

    # Faults

    def kill_actor(self) -> None:
        actor = self.random.choice([actor for actor in self.actors if not actor.spared])
        self.actors.remove(actor)
        actor.process.kill()
        actor.wire.close()
        self._spoiled.update(actor.wire.counts)
        self.injected["actor killed -9"] += 1
        self.add_actor()

    def freeze_actor(self) -> None:
        """SIGSTOP for longer than the learner waits."""
        actor = self.random.choice(self.actors)
        actor.process.signal(signal.SIGSTOP)
        time.sleep(self.dead_after_s + self.random.uniform(0.5, 2.0))
        actor.process.signal(signal.SIGCONT)
        self.injected["actor frozen"] += 1

    def cut_actor(self) -> None:
        actor = self.random.choice(self.actors)
        actor.wire.cut()
        time.sleep(self.random.choice((0.1, 0.5, self.dead_after_s + 1.0)))
        actor.wire.heal()
        self.injected["network cut"] += 1

    def tear_message(self) -> None:
        actor = self.random.choice(self.actors)
        actor.wire.tear()
        self.injected["message truncated"] += 1
        time.sleep(0.3)

    def disturb(self) -> None:
        """Messages are dropped, doubled, reordered and delayed for a while."""
        actor = self.random.choice(self.actors)
        actor.wire.rates = Rates(drop=0.05, double=0.1, reorder=0.1, delay=0.1)
        time.sleep(self.random.uniform(1.0, 3.0))
        actor.wire.rates = Rates()
        self.injected["network disturbed"] += 1

    def kill_learner(self, phase: str) -> None:
        """-9 in that phase: "ingest", "update", "checkpoint", "broadcast"; then resume."""
        if phase == "update":
            self.wait(self.updating, "an update runs")
            time.sleep(self.random.uniform(0.0, 0.03))
        elif phase == "broadcast":
            self.wait(self.broadcasting, "weights are sent")
        elif phase == "checkpoint":
            self.wait(self.saving, "a checkpoint is written")
            time.sleep(self.random.uniform(0.0, 0.02))
        else:
            time.sleep(self.random.uniform(0.0, 0.5))
            self.wait(self.ingesting, "a delivery is on its way")
        self.learner.kill()
        self.injected[f"learner killed -9 in {phase}"] += 1
        if self.random.random() < 0.3:
            time.sleep(self.dead_after_s + 1.0)  # long enough for actors to notice
        self.resume_learner()

    def resume_learner(self) -> None:
        self.learner = self._start_learner()

    def move_learner(self) -> None:
        """-9, if it still runs, and a resume at another address, as on another machine."""
        self.learner.kill()
        self._port = free_port()
        self.resume_learner()

    def messages_spoiled(self) -> Counter[str]:
        total = Counter(self._spoiled)
        for actor in self.actors:
            total.update(actor.wire.counts)
        return total

    def settled(self) -> bool:
        """Whether nothing is leased any more to an actor that is dead."""
        alive = {actor.name for actor in self.actors}
        rows = self.query(
            "SELECT DISTINCT name FROM leases JOIN actors USING (actor_id) WHERE status = 'playing'"
        )
        return all(name in alive for (name,) in rows)

    def end(self) -> int:
        """Ctrl-C: drain, checkpoint, everybody home. The learner's exit code."""
        self.look()
        self.learner.signal(signal.SIGINT)
        code = self.learner.wait(120)
        for actor in self.actors:
            assert actor.process.wait(60) == 0, actor.process.tail()
        return code
