"""The scheduler: who plays what, when a batch is there, and what a crash does not change."""

import threading
from pathlib import Path

import pytest

from capo.learner.run_reader import RunReader
from capo.learner.scheduler import Scheduler
from capo.learner.scheduler_rules import SchedulerRules
from capo.protocol.errors import CapoError, ConfigError, RunFileError
from capo.protocol.records import EpisodeStatus, Purpose
from tests.learner.run_records import new_run, task
from tests.learner.scheduler_world import World


def rules(**changes) -> SchedulerRules:
    return SchedulerRules(**{"seed": 7, "updates": 10, "batch_episodes": 4, **changes})


@pytest.fixture
def make_world(tmp_path: Path):
    worlds = []

    def make(num_tasks: int = 5, **changes) -> World:
        folder = tmp_path / f"run{len(worlds)}"
        worlds.append(World(folder, rules(**changes), num_tasks))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def test_a_synchronous_run_alternates(make_world):
    world = make_world()
    for version in range(3):
        [leases] = world.deal(ann=10).values()
        assert len(leases) == 4
        assert {lease.policy_version for lease in leases} == {version}
        assert world.deal(ann=10) == {}
        assert world.scheduler.take_batch(0.0) is None
        world.end_all("ann")
        assert world.deal(ann=10) == {}
        assert world.train() is not None


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_rollouts_run_ahead_by_max_staleness_batches(make_world, max_staleness):
    world = make_world(max_staleness=max_staleness)
    assert len(world.deal(ann=99)["ann"]) == 4 * (max_staleness + 1)
    for episode_id in sorted(world.held["ann"])[:4]:
        world.end("ann", episode_id)
    assert world.deal(ann=99) == {}  # buffered ones count as well
    world.train()
    assert len(world.deal(ann=99)["ann"]) == 4


def test_nothing_is_played_beyond_the_last_update(make_world):
    world = make_world(max_staleness=5, updates=2)
    assert len(world.deal(ann=99)["ann"]) == 8
    world.end_all("ann")
    world.train()
    world.train()
    assert world.deal(ann=99) == {}


def test_a_synchronous_batch_does_not_depend_on_who_is_faster(make_world):
    orders = []
    for arrival in ((0, 1, 2, 3), (3, 1, 0, 2)):
        world = make_world()
        world.deal(ann=2, bob=2)
        owners = {episode_id: who for who in ("ann", "bob") for episode_id in world.held[who]}
        for place in arrival:
            episode_id = f"t{place:08d}.1"
            world.end(owners[episode_id], episode_id)
        orders.append(world.train().episode_ids)
    assert orders[0] == orders[1] == tuple(f"t{number:08d}.1" for number in range(4))


def test_an_asynchronous_batch_takes_the_first_finished_sorted_by_number(make_world):
    world = make_world(max_staleness=1)
    world.deal(ann=8)
    for number in (7, 2, 5, 0, 1):
        world.end("ann", f"t{number:08d}.1")
    assert world.numbers(world.train()) == [0, 2, 5, 7]


def test_groups_go_out_and_come_in_whole(make_world):
    world = make_world(max_staleness=1, group_size=2)
    leases = world.deal(ann=3)["ann"]
    assert [(lease.group_id, lease.member) for lease in leases] == [
        ("g00000000", 0),
        ("g00000000", 1),
        ("g00000001", 0),
    ]
    leases += world.deal(bob=5)["bob"]
    assert leases[3].group_id == "g00000001"
    assert len({lease.task.id for lease in leases[:2]}) == 1
    assert len({lease.seed for lease in leases}) == 8
    for number in (0, 2, 4, 5, 3):  # group 2 is whole before group 1
        world.end("ann" if number < 3 else "bob", f"t{number:08d}.1")
    assert world.numbers(world.train()) == [2, 3, 4, 5]


def test_every_pass_plays_every_task_in_an_order_of_its_own(make_world):
    world = make_world(num_tasks=8, max_staleness=9)
    leases = world.deal(ann=99)["ann"]
    passes = [[lease.task.id for lease in leases[first : first + 8]] for first in (0, 8, 16)]
    assert all(sorted(tasks) == sorted(passes[0]) for tasks in passes)
    assert len({tuple(tasks) for tasks in passes}) == 3
    again = make_world(num_tasks=8, max_staleness=9).deal(bob=99)["bob"]
    assert [(lease.task, lease.seed) for lease in again] == [
        (lease.task, lease.seed) for lease in leases
    ]
    other = make_world(num_tasks=8, max_staleness=9, seed=8).deal(ann=99)["ann"]
    assert [lease.task.id for lease in other] != [lease.task.id for lease in leases]
    assert not {lease.seed for lease in other} & {lease.seed for lease in leases}


def test_leases_are_dealt_to_the_freest_actor(make_world):
    world = make_world(max_staleness=2)
    granted = world.deal(ann=9, bob=5, cat=0)
    assert {actor_id: len(leases) for actor_id, leases in granted.items()} == {"ann": 8, "bob": 4}


def test_a_failed_episode_is_played_again_by_anybody(make_world):
    world = make_world()
    world.deal(ann=4)
    world.end("ann", "t00000001.1", EpisodeStatus.ENV_ERROR)
    [lease] = world.deal(bob=4)["bob"]
    assert (lease.episode_id, lease.attempt) == ("t00000001.2", 2)
    world.end("bob", lease.episode_id)
    world.end_all("ann")
    assert world.numbers(world.train()) == [0, 1, 2, 3]
    assert world.scheduler.status().counts["reissued"] == 1


def test_a_lease_that_always_fails_is_given_up_and_replaced(make_world):
    """Or a synchronous run would wait for it for ever."""
    world = make_world(max_attempts=2)
    world.deal(ann=4)
    for attempt in (1, 2):
        world.end("ann", f"t00000001.{attempt}", EpisodeStatus.ENGINE_ERROR)
        world.deal(ann=4)
    assert "t00000004.1" in world.held["ann"]
    world.end_all("ann")
    assert world.numbers(world.train()) == [0, 2, 3, 4]
    assert world.scheduler.status().counts["given_up"] == 1


def test_an_episode_without_a_step_is_not_played_again(make_world):
    world = make_world()
    world.deal(ann=4)
    world.end("ann", "t00000000.1", EpisodeStatus.TRUNCATED, num_steps=0)
    assert [lease.episode_id for lease in world.deal(ann=9)["ann"]] == ["t00000004.1"]


def test_a_group_is_given_up_as_a_whole(make_world):
    world = make_world(group_size=2, max_attempts=1, max_staleness=1)
    world.deal(ann=1, bob=7)
    [first] = list(world.held["ann"])
    member, mate = first, f"t{int(first[1:9]) ^ 1:08d}.1"
    world.end("ann", member, EpisodeStatus.ENV_ERROR)
    assert world.revoke() == {"bob": [mate]}
    world.end("bob", mate)  # it was on its way
    assert world.excluded() == {"env_error": 1, "superseded": 1}
    world.deal(ann=2)
    world.end_all("ann")
    world.end_all("bob")
    assert world.excluded()[""] == 8


def test_a_buffered_member_of_a_given_up_group_is_excluded_and_counted(make_world):
    world = make_world(group_size=2, max_attempts=1)
    world.deal(ann=4)
    world.end("ann", "t00000000.1")
    world.end("ann", "t00000001.1", EpisodeStatus.ENV_ERROR)
    assert world.excluded() == {"env_error": 1, "group": 1}
    assert world.scheduler.status().buffered == 0


def test_too_old_episodes_are_excluded_and_counted_by_length(make_world):
    world = make_world(max_staleness=1)
    world.deal(ann=8)
    slow = "t00000000.1"
    for number in range(1, 8):
        world.end("ann", f"t{number:08d}.1")
    world.train()
    world.deal(ann=8)
    for episode_id in sorted(world.held["ann"])[1:]:
        world.end("ann", episode_id)
    world.train()
    assert world.version == 2
    world.end("ann", slow, version=0, num_steps=5)
    assert world.excluded()["stale"] == 1
    world.deal(ann=8)
    world.end_all("ann")
    batch = world.train()
    assert batch.stale_tokens == (15,)
    assert slow not in batch.episode_ids


def play_groups(world: World, *rewards: tuple[float, float]) -> None:
    """Ends whole groups of two, in the order in which they were handed out."""
    world.deal(ann=2 * len(rewards))
    held = sorted(world.held["ann"])
    assert len(held) == 2 * len(rewards)
    for episode_id, reward in zip(held, [one for pair in rewards for one in pair], strict=True):
        world.end("ann", episode_id, reward=reward)


def test_groups_that_all_did_alike_are_replaced(make_world):
    world = make_world(group_size=2, max_flat_batches=3)
    play_groups(world, (1, 0), (1, 1))
    assert world.train() is None
    assert world.excluded()["flat"] == 2
    play_groups(world, (0, 0))  # another one comes instead, and after that again
    assert world.train() is None
    play_groups(world, (0, 1))
    batch = world.train()
    assert world.numbers(batch) == [0, 1, 6, 7]
    assert batch.flat_groups == 2
    play_groups(world, (1, 0), (0, 1))
    assert world.train().flat_groups == 0


def test_a_policy_that_always_succeeds_still_gets_its_batches(make_world):
    world = make_world(group_size=2, max_flat_batches=1)
    play_groups(world, (1, 1), (1, 1))  # a batch's worth is replaced,
    play_groups(world, (1, 1), (1, 1))  # then they are taken as they are
    batch = world.train()
    assert world.numbers(batch) == [4, 5, 6, 7]
    assert batch.flat_groups == 2
    assert world.excluded()["flat"] == 4


@pytest.mark.parametrize("backwards", [False, True])
def test_what_a_synchronous_run_replaces_does_not_depend_on_who_was_faster(make_world, backwards):
    world = make_world(group_size=2, max_flat_batches=1, batch_episodes=6)
    for _ in range(2):
        world.deal(ann=6)
        for episode_id in sorted(world.held["ann"], reverse=backwards):
            number = int(episode_id[1:9])
            world.end("ann", episode_id, reward=float(number == 3))  # one group has contrast
    world.deal(ann=6)
    world.end_all("ann")
    assert world.numbers(world.train()) == [2, 3, 8, 9, 10, 11]
    assert world.excluded()["flat"] == 6


def test_an_asynchronous_run_remembers_what_was_replaced_since_its_newest_batch(make_world):
    world = make_world(group_size=2, max_flat_batches=1, max_staleness=1)
    play_groups(world, (1, 0), (1, 0), (1, 1), (0, 0))  # two are replaced, for the first batch
    assert world.train().flat_groups == 2
    world.restart()
    play_groups(world, (1, 1), (1, 0), (1, 1), (1, 1))  # two more for the second; one more is kept
    assert world.scheduler.status().buffered == 4
    world.restart()
    assert world.scheduler.status().buffered == 4
    batch = world.train()
    assert batch.flat_groups == 2
    assert world.excluded()["flat"] == 8


def test_without_max_flat_batches_every_group_is_taken(make_world):
    world = make_world(group_size=2)
    play_groups(world, (1, 1), (0, 0))
    assert world.numbers(world.train()) == [0, 1, 2, 3]


def test_a_crash_changes_nothing_for_flat_groups(make_world):
    """One that was replaced stays so, one whose replacing was not written down yet is replaced,
    and the limit goes on where it was."""
    world = make_world(group_size=2, max_flat_batches=1)
    play_groups(world, (1, 1))
    held = sorted(world.deal(ann=2)["ann"], key=lambda lease: lease.episode_id)
    for lease in held:
        world.end("ann", lease.episode_id, reward=0.0, late=True)
    world.restart()
    play_groups(world, (1, 1), (0, 0))
    assert world.excluded()["flat"] == 4
    batch = world.train()
    assert world.numbers(batch) == [4, 5, 6, 7]
    world.restart()
    play_groups(world, (1, 1), (1, 1))
    play_groups(world, (1, 0), (1, 1))
    assert world.numbers(world.train()) == [12, 13, 14, 15]


def test_an_actor_with_old_weights_cannot_spoil_a_synchronous_run(make_world):
    world = make_world()
    world.deal(ann=4)
    world.end_all("ann")
    world.train()
    world.deal(ann=4)
    world.end("ann", "t00000004.1", version=0)
    assert [lease.episode_id for lease in world.deal(ann=4)["ann"]] == ["t00000008.1"]


def test_what_a_lost_actor_played_goes_to_others(make_world):
    world = make_world()
    world.deal(ann=2, bob=2)
    lost = sorted(world.held["ann"])
    world.scheduler.actor_lost("ann")
    assert world.scheduler.holders() == {"bob"}
    granted = world.deal(bob=9)["bob"]
    assert [lease.lease_id for lease in granted] == [name.split(".")[0] for name in lost]
    assert {lease.attempt for lease in granted} == {2}
    assert world.back("ann") == lost
    world.end_all("bob")
    assert world.train() is not None


def test_what_a_lost_actor_still_delivers_counts_if_nobody_else_got_it(make_world):
    world = make_world()
    world.deal(ann=4)
    world.scheduler.actor_lost("ann")
    world.end("ann", "t00000002.1")
    assert {lease.lease_id for lease in world.deal(bob=9)["bob"]} == {
        "t00000000",
        "t00000001",
        "t00000003",
    }


def test_a_returning_actor_keeps_its_leases(make_world):
    world = make_world()
    world.deal(ann=4)
    world.scheduler.actor_lost("ann")
    assert world.back("ann") == []
    assert world.deal(bob=9) == {}
    world.end_all("ann")
    assert world.numbers(world.train()) == [0, 1, 2, 3]


def test_a_lease_that_never_arrived_goes_to_somebody_else_and_is_no_failure(make_world):
    world = make_world(max_attempts=1)
    world.deal(ann=4)
    del world.held["ann"]["t00000003.1"]
    world.back("ann")
    assert [lease.episode_id for lease in world.deal(bob=9)["bob"]] == ["t00000003.2"]
    assert world.scheduler.status().counts.get("given_up", 0) == 0


def test_an_actor_that_has_not_heard_of_an_ack_does_not_hold_what_has_ended(make_world):
    world = make_world()
    held = [lease.episode_id for lease in world.deal(ann=4)["ann"]]
    world.end("ann", held[0])
    assert world.scheduler.actor_back("ann", held) == set(held[1:])


def test_an_unknown_episode_is_revoked(make_world):
    world = make_world()
    world.scheduler.actor_back("ann", ["t00000003.1", "nonsense"])
    assert world.revoke() == {"ann": ["nonsense", "t00000003.1"]}
    assert world.revoke() == {}


def test_an_evaluation_comes_first_and_training_waits(make_world):
    world = make_world(max_staleness=1)
    world.deal(ann=2)
    games = [task(number) for number in (100, 101, 102)]
    world.scheduler.start_evaluation(games, ["sampled", "greedy"])
    leases = world.deal(ann=9)["ann"]
    assert [lease.purpose for lease in leases] == [Purpose.EVAL_SAMPLED] * 3 + [
        Purpose.EVAL_GREEDY
    ] * 3
    assert [lease.seed for lease in leases[:3]] == [lease.seed for lease in leases[3:]]
    assert world.deal(bob=9) == {}
    for place, lease in enumerate(leases):
        assert world.scheduler.wait_evaluation(0.0) is None
        world.end("ann", lease.episode_id, outcome=float(place < 2), num_steps=place + 1)
    results = world.scheduler.wait_evaluation(0.0)
    assert results["sampled"].success == pytest.approx(2 / 3)
    assert results["sampled"].success_stderr == pytest.approx(1 / 3)
    assert results["greedy"].success == 0.0
    assert results["greedy"].mean_steps == 5.0
    assert len(world.deal(bob=9)["bob"]) == 6
    assert world.train() is None  # evaluation episodes are no training data


def test_an_evaluation_counts_what_could_not_be_played(make_world):
    world = make_world(max_attempts=2)
    world.scheduler.start_evaluation([task(1), task(2)], ["greedy"])
    for _ in range(2):
        world.deal(ann=9)
        for episode_id in sorted(world.held["ann"]):
            if episode_id.startswith("e0001-greedy-00000"):
                world.end("ann", episode_id, EpisodeStatus.ENV_ERROR)
    world.end_all("ann", outcome=1.0)
    result = world.scheduler.wait_evaluation(0.0)["greedy"]
    assert (result.episodes, result.given_up, result.success) == (1, 1, 1.0)


def test_an_interrupted_evaluation_is_continued(make_world):
    world = make_world()
    games = [task(1), task(2)]
    world.scheduler.start_evaluation(games, ["greedy"])
    world.deal(ann=9)
    world.end("ann", "e0001-greedy-00001.1", outcome=1.0)
    world.restart()
    world.scheduler.start_evaluation(games, ["greedy"])
    assert world.deal(bob=9) == {}  # ann still plays the other one
    world.scheduler.actor_lost("ann")
    assert [lease.episode_id for lease in world.deal(bob=9)["bob"]] == ["e0001-greedy-00000.2"]
    world.end_all("bob", outcome=0.0)
    assert world.scheduler.wait_evaluation(0.0)["greedy"].success == 0.5
    world.restart()
    world.scheduler.start_evaluation(games, ["greedy"])  # finished before the crash
    assert world.scheduler.wait_evaluation(0.0)["greedy"].success == 0.5
    with RunReader(world.folder) as reader:
        assert len(reader.evaluations()) == 1


def test_too_many_errors_stop_the_run_with_counts_and_the_last_error(make_world):
    world = make_world(max_error_fraction=0.5, error_window=4, max_attempts=9)
    for _ in range(3):
        world.deal(ann=1)
        assert world.scheduler.take_batch(0.0) is None
        world.end_all("ann", status=EpisodeStatus.ENV_ERROR)
    with pytest.raises(CapoError, match=r"3 of the last 3 .* allows 2 of 4; .*t00000000.3"):
        world.scheduler.take_batch(0.0)


def test_lost_actors_are_no_errors(make_world):
    world = make_world(max_error_fraction=0.0, error_window=4, max_attempts=9)
    for _ in range(5):
        world.deal(ann=4)
        world.scheduler.actor_lost("ann")
    assert world.scheduler.take_batch(0.0) is None


def test_a_waiting_learner_wakes_up_for_its_batch(make_world):
    world = make_world()
    world.deal(ann=4)
    found = []
    waiting = threading.Thread(target=lambda: found.append(world.scheduler.take_batch(30.0)))
    waiting.start()
    world.end_all("ann")
    waiting.join()
    assert world.numbers(found[0]) == [0, 1, 2, 3]


def test_a_waiting_learner_wakes_up_when_it_is_stopped(make_world):
    world = make_world()
    errors = []

    def wait() -> None:
        try:
            world.scheduler.take_batch(30.0)
        except CapoError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    world.scheduler.stop("the writer died")
    waiting.join()
    assert errors == ["the writer died"]


def test_status_says_who_waits_for_whom(make_world):
    world = make_world()
    now = [100.0]
    world.scheduler = Scheduler.create(
        world.rules, world.tasks, world.run_file, clock=lambda: now[0]
    )
    world.deal(ann=1, bob=1)
    now[0] = 110.0
    world.scheduler.take_batch(0.0)
    now[0] = 130.0
    status = world.scheduler.status()
    assert [(wait.who, wait.whom, wait.since_s) for wait in status.waits] == [
        ("the learner", "batch", 20.0),
        ("the scheduler", "actor ann to end episode t00000000.1", 30.0),
        ("the scheduler", "actor bob to end episode t00000001.1", 30.0),
    ]
    assert status.playing == {"ann": 1, "bob": 1}


def test_a_batch_is_taken_once(make_world):
    world = make_world()
    world.deal(ann=4)
    world.end_all("ann")
    world.scheduler.take_batch(0.0)
    with pytest.raises(ValueError, match="was taken already"):
        world.scheduler.take_batch(0.0)
    with pytest.raises(ValueError, match="does not follow"):
        world.scheduler.version_advanced(2)


def test_batches_that_were_taken_before_a_crash_are_taken_again(make_world):
    world = make_world(max_staleness=1)
    for _ in range(3):
        world.deal(ann=8)
        for episode_id in sorted(world.held["ann"], reverse=True)[:4]:
            world.end("ann", episode_id)
        world.train()
    before = [world.batches[version].episode_ids for version in range(3)]
    world.restart(version=1)
    assert world.deal(bob=9) == {}  # until the repeated updates are done
    again = [world.train(), world.train()]
    assert [batch.episode_ids for batch in again] == before[1:]
    assert [batch.again for batch in again] == [True, True]
    assert world.deal(bob=9) != {}


def test_an_end_that_came_too_late_does_not_count_after_a_crash(make_world):
    """It was committed, but before the scheduler heard of it somebody else got the lease."""
    world = make_world()
    world.deal(ann=4)
    world.scheduler.actor_lost("ann")
    world.end("ann", "t00000000.1", late=True)
    world.deal(bob=4)
    assert "t00000000.2" in world.held["bob"]
    world.restart()
    assert world.scheduler.status().playing == {"bob": 4}
    world.end_all("bob")
    assert world.train().episode_ids[0] == "t00000000.2"
    assert world.excluded() == {"": 4, "superseded": 1}


def test_a_lease_lost_in_a_crash_is_played_with_the_weights_it_was_meant_for(make_world):
    world = make_world()
    for _ in range(2):
        world.deal(ann=4)
        world.end_all("ann")
        world.train()
    world.deal(ann=4)
    world.restart(version=0)
    world.scheduler.actor_lost("ann")
    assert world.deal(bob=9) == {}
    world.train()
    assert world.deal(bob=9) == {}
    world.train()
    assert {lease.policy_version for lease in world.deal(bob=9)["bob"]} == {2}


def test_a_run_that_crashed_before_its_first_checkpoint_goes_on(make_world):
    world = make_world()
    world.deal(ann=4)
    opened = Scheduler.open(world.rules, world.tasks, world.run_file, 0)
    assert opened.holders() == {"ann"}


def test_opening_a_new_run_creates_its_scheduler(tmp_path):
    run_file = new_run(tmp_path)
    opened = Scheduler.open(rules(), [task(0)], run_file, 0)
    assert [lease.episode_id for lease in opened.deal({"ann": 1})["ann"]] == ["t00000000.1"]
    run_file.close()


def test_other_tasks_are_refused_on_resume(make_world):
    world = make_world()
    world.deal(ann=4)
    with pytest.raises(RunFileError, match="training tasks are not those"):
        Scheduler.restore(world.rules, world.tasks[1:], world.run_file, 0)


def test_an_environment_without_tasks_is_refused(tmp_path):
    run_file = new_run(tmp_path)
    with pytest.raises(ConfigError, match="no training tasks"):
        Scheduler.create(rules(), [], run_file)
    run_file.close()


def test_batches_hold_whole_groups():
    for group_size in (3, 0):
        with pytest.raises(
            ValueError, match=f"4 episodes cannot hold whole groups of {group_size}"
        ):
            rules(group_size=group_size)
