"""What holds in every history of a scheduler: actors that fail, vanish and return, and restarts."""

import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from capo.learner.lease_book import FAILURES
from capo.learner.run_reader import RunReader
from capo.learner.run_tables import EpisodeRow, LeaseRow
from capo.learner.scheduler_rules import SchedulerRules
from capo.protocol.records import EpisodeStatus
from tests.learner.run_records import task
from tests.learner.scheduler_world import World

ACTORS = ("ann", "bob", "cat")
GAMES = [task(number) for number in (100, 101)]
ENDS = st.sampled_from(
    [EpisodeStatus.TERMINATED] * 4
    + [EpisodeStatus.TRUNCATED, EpisodeStatus.ENV_ERROR, EpisodeStatus.LOST]
)


class SchedulerMachine(RuleBasedStateMachine):
    """`forgotten`: what crashed actors played, which nobody will ever end."""

    @initialize(
        group_size=st.integers(1, 3),
        groups=st.integers(1, 2),
        max_staleness=st.integers(0, 2),
        max_attempts=st.integers(1, 3),
        max_flat_batches=st.integers(0, 2),
    )
    def start(
        self,
        group_size: int,
        groups: int,
        max_staleness: int,
        max_attempts: int,
        max_flat_batches: int,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="scheduler-", dir=_fast_folder()))
        self.world = World(
            self.folder / "run",
            SchedulerRules(
                seed=3,
                updates=5,
                batch_episodes=group_size * groups,
                group_size=group_size,
                max_staleness=max_staleness,
                max_attempts=max_attempts,
                max_flat_batches=max_flat_batches,
                error_window=10**6,
            ),
            num_tasks=3,
        )
        self.evaluating = False

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.finish()
            finally:
                self.world.close()
                shutil.rmtree(self.folder)

    @rule(ann=st.integers(0, 3), bob=st.integers(0, 3), cat=st.integers(0, 3))
    def deal(self, ann: int, bob: int, cat: int) -> None:
        for actor_id, leases in self.world.deal(ann=ann, bob=bob, cat=cat).items():
            assert len(leases) <= {"ann": ann, "bob": bob, "cat": cat}[actor_id]
            for lease in leases:
                assert (lease.purpose == "train") is not self.evaluating

    @rule(
        actor_id=st.sampled_from(ACTORS),
        which=st.integers(0, 99),
        status=ENDS,
        age=st.integers(0, 2),
        num_steps=st.integers(0, 3),
        reward=st.integers(0, 1),
        late=st.booleans(),
    )
    def end(
        self,
        actor_id: str,
        which: int,
        status: EpisodeStatus,
        age: int,
        num_steps: int,
        reward: int,
        late: bool,
    ) -> None:
        held = sorted(self.world.held[actor_id])
        if held:
            self.world.end(
                actor_id,
                held[which % len(held)],
                status,
                version=max(0, self.world.version - age),
                num_steps=num_steps,
                reward=float(reward),
                late=late,
            )

    @rule()
    def catch_up(self) -> None:
        self.world.catch_up()

    @precondition(lambda self: not self.evaluating)
    @rule(
        actor_id=st.sampled_from(ACTORS),
        ages=st.lists(st.integers(0, 2), max_size=12),
        rewards=st.lists(st.integers(0, 1), min_size=12, max_size=12),
    )
    def play_and_train(self, actor_id: str, ages: list[int], rewards: list[int]) -> None:
        """An actor ends what it gets, at weights of different ages, and a batch may be there."""
        world = self.world
        world.deal(**{actor_id: len(ages)})
        held = sorted(world.held[actor_id])
        for age, reward, episode_id in zip(ages, rewards, held, strict=False):
            version = max(0, world.version - age)
            world.end(actor_id, episode_id, version=version, reward=float(reward))
        self.train()

    @rule(actor_id=st.sampled_from(ACTORS))
    def cut_off(self, actor_id: str) -> None:
        """The learner hears nothing more of the actor, which plays on."""
        self.world.scheduler.actor_lost(actor_id)

    @rule(actor_id=st.sampled_from(ACTORS))
    def come_back(self, actor_id: str) -> None:
        self.world.back(actor_id)
        status = self.world.scheduler.status()
        assert status.playing.get(actor_id, 0) == len(self.world.held[actor_id])

    @rule(actor_id=st.sampled_from(ACTORS))
    def crash(self, actor_id: str) -> None:
        """The actor dies and a new one comes under its name."""
        self.world.held[actor_id].clear()
        self.world.back(actor_id)

    @rule(actor_id=st.sampled_from(ACTORS), which=st.integers(0, 99))
    def lose_a_grant(self, actor_id: str, which: int) -> None:
        """The lease was written down, but the message never arrived."""
        held = sorted(self.world.held[actor_id])
        if held:
            del self.world.held[actor_id][held[which % len(held)]]

    @precondition(lambda self: not self.evaluating)
    @rule()
    def train(self) -> None:
        if self.world.version < self.world.rules.updates:
            self.world.train()

    @precondition(lambda self: not self.evaluating)
    @rule()
    def start_evaluation(self) -> None:
        self.world.scheduler.start_evaluation(GAMES, ["sampled"])
        self.evaluating = True

    @precondition(lambda self: self.evaluating)
    @rule()
    def finish_evaluation(self) -> None:
        results = self.world.scheduler.wait_evaluation(0.0)
        if results is not None:
            assert results["sampled"].episodes + results["sampled"].given_up == len(GAMES)
            self.evaluating = False

    @rule(back=st.integers(0, 2))
    def kill_learner(self, back: int) -> None:
        """It resumes from the newest checkpoint or from one before."""
        heard_all = not self.world.unheard
        before = self.world.scheduler.status()
        self.world.restart(max(0, self.world.version - back))
        if self.evaluating:
            self.evaluating = False
        elif back == 0 and heard_all:
            after = self.world.scheduler.status()
            for name in ("version", "batches", "playing", "waiting", "buffered"):
                assert getattr(after, name) == getattr(before, name), name

    @invariant()
    def never_more_than_can_be_consumed_in_time(self) -> None:
        if not hasattr(self, "world") or self.evaluating:
            return
        rules, status = self.world.rules, self.world.scheduler.status()
        alive = sum(status.playing.values()) + status.waiting + status.buffered
        consumable = min(self.world.newest + rules.max_staleness + 1, rules.updates)
        assert status.batches * rules.batch_episodes + alive <= consumable * rules.batch_episodes

    def finish(self) -> None:
        """All actors die, one honest actor comes: the run must end by itself, and add up."""
        world = self.world
        world.catch_up()
        for actor_id in ACTORS:
            world.held[actor_id].clear()
            world.scheduler.actor_lost(actor_id)
        for _ in range(200):
            world.deal(zoe=99)
            world.revoke()
            world.end_all("zoe")
            if self.evaluating:
                self.evaluating = world.scheduler.wait_evaluation(0.0) is None
            elif world.version < world.rules.updates:
                world.train()
            else:
                break
        assert world.version == world.rules.updates, world.scheduler.status()
        assert world.deal(zoe=99) == {}
        check_books(world)


def check_books(world: World) -> None:
    """Reads the run file alone: every lease has one fate, every batch is what it should be."""
    rules = world.rules
    with RunReader(world.folder) as reader:
        leases, episodes, updates = reader.leases(), reader.episodes(), reader.updates()
    by_episode = {row.episode_id: row for row in leases}
    trained = [episode_id for update in updates for episode_id in update.episode_ids]
    assert len(trained) == len(set(trained)) == rules.updates * rules.batch_episodes
    assert [update.version for update in updates] == list(range(rules.updates))
    for update in updates:
        assert update.episode_ids == world.batches[update.version].episode_ids
        rows = [by_episode[episode_id] for episode_id in update.episode_ids]
        assert [row.number for row in rows] == sorted(row.number for row in rows)
        groups = defaultdict[str, list[int]](list)
        for row in rows:
            groups[row.group_id].append(row.member)
        assert all(members == list(range(rules.group_size)) for members in groups.values())
    for row in episodes:
        assert (row.consumed_by is not None) == (row.episode_id in trained)
        if row.consumed_by is not None:
            assert row.excluded == ""
            assert row.status in ("terminated", "truncated")
            assert row.consumed_by - row.min_version <= rules.max_staleness
    check_flat_groups(rules, leases, episodes)
    fates = Counter(row.lease_id for row in leases if row.episode_id in trained)
    assert set(fates.values()) <= {1}
    excluded = {row.episode_id: row.excluded for row in episodes}
    attempts = defaultdict[str, list[str]](list)
    for row in sorted(leases, key=lambda row: row.attempt):
        if row.purpose == "train":
            attempts[row.lease_id].append(row.status)
            if row.episode_id not in trained and row.episode_id in excluded:
                assert excluded[row.episode_id] != ""
    dropped = {
        row.group_id
        for row in leases
        if row.status == "closed"
        or sum(status in FAILURES for status in attempts[row.lease_id]) >= rules.max_attempts
        or "empty" in attempts[row.lease_id]
        or excluded.get(row.episode_id) in ("stale", "group", "flat")
    }
    for row in leases:
        if row.purpose == "train" and row.lease_id not in fates:
            assert row.group_id in dropped, f"{row.lease_id} was neither trained on nor counted"


def check_flat_groups(
    rules: SchedulerRules, leases: Sequence[LeaseRow], episodes: Sequence[EpisodeRow]
) -> None:
    """Whole groups whose members all did alike were replaced, and never more than allowed."""
    group_of = {row.episode_id: row.group_id for row in leases}
    replaced = defaultdict[str, list[float]](list)
    for row in episodes:
        if row.excluded == "flat":
            replaced[group_of[row.episode_id]].append(row.episode_return)
    for returns in replaced.values():
        assert len(returns) == rules.group_size > 1
        assert len(set(returns)) == 1
    groups_in_batch = rules.batch_episodes // rules.group_size
    assert len(replaced) <= rules.max_flat_batches * groups_in_batch * rules.updates


def _fast_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.generate],  # a failure is told at once; shrinking replays real files for minutes
    database=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
