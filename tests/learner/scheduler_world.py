"""A scheduler over a real run file, and actors that do what they are told. No sockets."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from capo.learner.run_endings import EndedEpisode
from capo.learner.run_file import RunFile
from capo.learner.run_reader import RunReader
from capo.learner.scheduler import Scheduler
from capo.learner.scheduler_rules import SchedulerRules
from capo.learner.scheduler_status import Batch
from capo.protocol.records import EpisodeStatus, Lease, Task
from tests.learner.run_records import episode, new_run, task


class World:
    """`held` are the leases each actor has, by episode id; nobody forgets one by accident."""

    def __init__(self, folder: Path, rules: SchedulerRules, num_tasks: int = 5) -> None:
        self.folder = folder
        self.rules = rules
        self.tasks: Sequence[Task] = [task(number) for number in range(num_tasks)]
        self.held = defaultdict[str, dict[str, Lease]](dict)
        self.batches = dict[int, Batch]()
        self.unheard = list[EndedEpisode]()  # committed, but the scheduler does not know yet
        self.version = 0
        self.newest = 0  # reached so far, before any restart
        self.run_file = new_run(folder)
        self.scheduler = Scheduler.create(rules, self.tasks, self.run_file)

    def close(self) -> None:
        self.run_file.close()

    def deal(self, **free: int) -> dict[str, list[Lease]]:
        granted = self.scheduler.deal(free)
        for actor_id, leases in granted.items():
            self.held[actor_id].update({lease.episode_id: lease for lease in leases})
        return granted

    def end(
        self,
        actor_id: str,
        episode_id: str,
        status: EpisodeStatus = EpisodeStatus.TERMINATED,
        *,
        version: int | None = None,
        num_steps: int = 1,
        outcome: float = 1.0,
        reward: float = 1.0,
        late: bool = False,
    ) -> None:
        """This actor delivers the whole episode, sampled at `version` (now, if not given).

        `late`: it is committed, and the scheduler hears of it at the next `catch_up`.
        """
        self.held[actor_id].pop(episode_id, None)
        delivery = episode(
            self.run_file.last_sequence(actor_id) + 1,
            episode_id,
            num_steps,
            status,
            version=self.version if version is None else version,
            outcome=outcome,
            reward=reward,
        )
        self.unheard += self.run_file.commit([(actor_id, delivery)]).ended
        if not late:
            self.catch_up()

    def catch_up(self) -> None:
        for ended in self.unheard:
            self.scheduler.episode_ended(ended)
        self.unheard.clear()

    def end_all(self, actor_id: str, **how: object) -> None:
        for episode_id in sorted(self.held[actor_id]):
            self.end(actor_id, episode_id, **how)

    def back(self, actor_id: str) -> list[str]:
        """The actor says what it holds, and drops what is revoked; the revoked episodes."""
        self.scheduler.actor_back(actor_id, self.held[actor_id])
        return self.revoke().get(actor_id, [])

    def revoke(self) -> dict[str, list[str]]:
        told = defaultdict[str, list[str]](list)
        for revocation in self.scheduler.take_revocations():
            self.held[revocation.actor_id].pop(revocation.episode_id, None)
            told[revocation.actor_id].append(revocation.episode_id)
        return told

    def train(self) -> Batch | None:
        """One update, if its batch is there."""
        batch = self.scheduler.take_batch(0.0)
        if batch is not None:
            assert batch.version == self.version
            before = self.batches.setdefault(batch.version, batch)
            assert before.episode_ids == batch.episode_ids
            assert batch.again == (batch.version < self.newest)
            self.run_file.finish_update(batch.version, seeds={}, metrics={}, result=b"")
            self.version += 1
            self.newest = max(self.newest, self.version)
            self.scheduler.version_advanced(self.version)
        return batch

    def restart(self, version: int | None = None) -> None:
        """The learner is killed and resumes from the checkpoint of `version` (the newest)."""
        self.version = self.version if version is None else version
        self.unheard.clear()
        self.run_file.close()
        self.run_file = RunFile.open(self.folder)
        self.scheduler = Scheduler.restore(self.rules, self.tasks, self.run_file, self.version)

    def numbers(self, batch: Batch | None) -> list[int]:
        """The lease numbers of a batch, in its order."""
        assert batch is not None
        with RunReader(self.folder) as reader:
            numbers = {row.episode_id: row.number for row in reader.leases()}
        return [numbers[episode_id] for episode_id in batch.episode_ids]

    def excluded(self) -> Counter[str]:
        with RunReader(self.folder) as reader:
            return Counter(row.excluded for row in reader.episodes())
