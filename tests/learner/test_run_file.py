"""The run file: what is acked is there exactly once, whatever happens to process and disk."""

import math
import multiprocessing
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from capo.learner.run_endings import EpisodeLimits
from capo.learner.run_file import RunFile
from capo.learner.run_leases import Note
from capo.learner.run_reader import RunReader
from capo.protocol.errors import ProtocolError, RunFileError, StorageFullError
from capo.protocol.messages import Delivery
from capo.protocol.records import EpisodeStatus, VersionSpan
from tests.learner.run_records import end, episode, lend, new_run, step, stored_steps

EPISODE = "t00000001.1"


@pytest.fixture
def run_file(tmp_path: Path):
    run_file = new_run(tmp_path / "run")
    lend(run_file, "ann", 1)
    yield run_file
    run_file.close()


def read(run_file: RunFile) -> RunReader:
    return RunReader(run_file.path)


def test_what_was_delivered_is_read_back_unchanged(run_file):
    entropies = np.array([0.5, 0.25, 0.125], dtype=np.float32)
    first = msgspec.structs.replace(step(EPISODE, 0), entropies=entropies)
    second = msgspec.structs.replace(
        step(EPISODE, 1, reward=-0.5), versions=(VersionSpan(3, 1), VersionSpan(4, 2))
    )
    last = end(EPISODE, 2, EpisodeStatus.TRUNCATED, outcome=0.25)
    run_file.commit([("ann", Delivery(sequence=1, steps=(first, second), ends=(last,)))])
    with read(run_file) as reader:
        [found] = reader.read_episodes([EPISODE])
        [row] = reader.episodes()
    for mine, theirs in zip(found.steps, (first, second), strict=True):
        for name in ("observation", "action", "behaviour_logprobs"):
            assert getattr(mine, name).dtype == getattr(theirs, name).dtype
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
        for name in ("index", "keep", "versions", "reward", "state_key", "info"):
            assert getattr(mine, name) == getattr(theirs, name)
    np.testing.assert_array_equal(found.steps[0].entropies, entropies)
    assert found.steps[1].entropies is None
    np.testing.assert_array_equal(found.end.final_observation, last.final_observation)
    assert (found.end.status, found.end.final_keep) == (EpisodeStatus.TRUNCATED, 4)
    assert (found.task_id, found.group_id, found.member) == ("game-1", "g00000001", 0)
    assert (row.episode_return, row.num_action_tokens) == (-0.5, 6)
    assert (row.min_version, row.max_version) == (0, 4)


LIMITS = EpisodeLimits(vocabulary_size=1000, max_length=40)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"keep": 999}, "keeps 999 tokens of a sequence of"),
        ({"action": np.array([1, 2, 1000], dtype=np.int32)}, "not in the vocabulary of 1000"),
        ({"observation": np.array([-1], dtype=np.int32)}, "not in the vocabulary of 1000"),
        ({"observation": np.zeros(50, dtype=np.int32)}, "but 40 is the longest"),
    ],
)
def test_a_step_that_would_break_every_update_never_becomes_training_data(
    run_file, changes, complaint
):
    bad = msgspec.structs.replace(step(EPISODE, 1), **changes)
    delivery = Delivery(sequence=1, steps=(step(EPISODE, 0), bad), ends=(end(EPISODE, 2),))
    [ended] = run_file.commit([("ann", delivery)], LIMITS).ended
    assert ended.excluded == "incomplete"
    assert complaint in ended.error


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"final_keep": 500}, "the final prompt keeps 500 tokens"),
        ({"final_observation": np.array([2000], dtype=np.int32)}, "not in the vocabulary"),
    ],
)
def test_a_final_prompt_that_cannot_be_read_never_becomes_training_data(
    run_file, changes, complaint
):
    last = msgspec.structs.replace(end(EPISODE, 1, EpisodeStatus.TRUNCATED), **changes)
    delivery = Delivery(sequence=1, steps=(step(EPISODE, 0),), ends=(last,))
    [ended] = run_file.commit([("ann", delivery)], LIMITS).ended
    assert ended.excluded == "incomplete"
    assert complaint in ended.error


def test_token_blobs_are_little_endian_for_other_programs(run_file):
    sent = step(EPISODE)
    run_file.commit([("ann", Delivery(sequence=1, steps=(sent,)))])
    connection = sqlite3.connect(run_file.path)
    [(action, logprobs, versions)] = connection.execute(
        "SELECT action, behaviour_logprobs, versions FROM steps"
    ).fetchall()
    connection.close()
    assert action == b"".join(int(token).to_bytes(4, "little") for token in sent.action)
    np.testing.assert_array_equal(np.frombuffer(logprobs, "<f4"), sent.behaviour_logprobs)
    assert versions == "[[0,3]]"


def test_a_delivery_sent_again_changes_nothing(run_file):
    delivery = episode(1, EPISODE)
    first = run_file.commit([("ann", delivery)])
    again = run_file.commit([("ann", delivery), ("ann", delivery)])
    assert [ended.episode_id for ended in first.ended] == [EPISODE]
    assert again.ended == ()
    assert again.num_steps == 0
    assert run_file.last_sequence("ann") == 1
    assert stored_steps(run_file.path.parent) == [(EPISODE, 0), (EPISODE, 1)]


def test_records_that_come_in_another_delivery_are_stored_once(run_file):
    run_file.commit([("ann", Delivery(sequence=1, steps=(step(EPISODE, 0),)))])
    whole = episode(2, EPISODE)
    committed = run_file.commit([("ann", whole), ("ann", episode(3, EPISODE))])
    assert len(committed.ended) == 1
    assert stored_steps(run_file.path.parent) == [(EPISODE, 0), (EPISODE, 1)]


def test_a_gap_between_deliveries_is_refused_and_nothing_of_it_is_stored(run_file):
    lend(run_file, "bob", 2)
    with pytest.raises(ProtocolError, match=r"ann sent delivery 2 after 0"):
        run_file.commit([("bob", episode(1, "t00000002.1")), ("ann", episode(2, EPISODE))])
    assert (run_file.last_sequence("ann"), run_file.last_sequence("bob")) == (0, 0)
    assert stored_steps(run_file.path.parent) == []


def test_an_episode_is_accepted_from_its_owner_only(run_file):
    committed = run_file.commit(
        [
            ("eve", episode(1, EPISODE)),
            ("eve", episode(2, "t00000099.1")),
            ("ann", episode(1, EPISODE, 1)),
        ]
    )
    assert committed.num_refused == 6
    assert "leased to nobody" in committed.fault
    assert [ended.actor_id for ended in committed.ended] == ["ann"]
    assert stored_steps(run_file.path.parent) == [(EPISODE, 0)]
    assert run_file.last_sequence("eve") == 2  # or it would send them for ever


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"reward": math.nan}, "its reward is nan"),
        ({"reward": math.inf}, "its reward is inf"),
        ({"behaviour_logprobs": np.array([-1, np.nan, -1], np.float32)}, "not a number"),
        ({"behaviour_logprobs": np.zeros(2, np.float32)}, "2 log-probs for 3"),
        ({"versions": (VersionSpan(0, 2),)}, "do not cover its 3"),
        ({"versions": (VersionSpan(2**63, 3),)}, "span is impossible"),
        ({"action": np.zeros(0, np.int32)}, "no token"),
        ({"entropies": np.zeros(1, np.float32)}, "1 entropies"),
        ({"keep": 2**63}, "its keep"),
    ],
)
def test_a_step_that_cannot_be_training_data_spoils_its_episode_alone(run_file, change, reason):
    lend(run_file, "ann", 2)
    bad = msgspec.structs.replace(step(EPISODE), **change)
    committed = run_file.commit(
        [
            ("ann", Delivery(sequence=1, steps=(bad,))),
            ("ann", episode(2, "t00000002.1")),
        ]
    )
    assert committed.num_refused == 1
    assert reason in committed.fault
    [good] = committed.ended
    assert good.excluded == ""
    [spoiled] = run_file.commit([("ann", Delivery(sequence=3, ends=(end(EPISODE, 1),)))]).ended
    assert spoiled.excluded == "incomplete"
    assert spoiled.error == "0 of 1 steps arrived"


@pytest.mark.parametrize(
    ("status", "num_steps", "outcome", "excluded"),
    [
        (EpisodeStatus.TERMINATED, 1, 1.0, ""),
        (EpisodeStatus.TRUNCATED, 1, 1.0, ""),
        (EpisodeStatus.ENV_ERROR, 1, 0.0, "env_error"),
        (EpisodeStatus.ENGINE_ERROR, 1, 0.0, "engine_error"),
        (EpisodeStatus.LOST, 1, 0.0, "lost"),
        (EpisodeStatus.TERMINATED, 2, 1.0, "incomplete"),
        (EpisodeStatus.TERMINATED, 1, math.nan, "incomplete"),
    ],
)
def test_why_an_episode_is_no_training_data(run_file, status, num_steps, outcome, excluded):
    delivery = Delivery(
        sequence=1,
        steps=(step(EPISODE),),
        ends=(end(EPISODE, num_steps, status, outcome=outcome),),
    )
    [ended] = run_file.commit([("ann", delivery)]).ended
    assert ended.excluded == excluded
    with read(run_file) as reader:
        assert [row.status for row in reader.leases()] == [excluded or status.value]


def test_steps_with_a_hole_are_incomplete(run_file):
    steps = (step(EPISODE, 0), step(EPISODE, 2))
    [ended] = run_file.commit(
        [("ann", Delivery(sequence=1, steps=steps, ends=(end(EPISODE, 2),)))]
    ).ended
    assert ended.excluded == "incomplete"


def test_an_episode_without_a_step_is_empty(run_file):
    [ended] = run_file.commit([("ann", episode(1, EPISODE, 0, EpisodeStatus.TRUNCATED))]).ended
    assert ended.excluded == "empty"
    assert ended.min_version is None


def test_an_older_attempt_is_stored_but_superseded(run_file):
    lend(run_file, "bob", 1, attempt=2)
    [late] = run_file.commit([("ann", episode(1, EPISODE))]).ended
    [newest] = run_file.commit([("bob", episode(1, "t00000001.2"))]).ended
    assert (late.excluded, newest.excluded) == ("superseded", "")
    assert len(stored_steps(run_file.path.parent)) == 4


def test_what_nobody_waits_for_is_superseded(run_file):
    run_file.record_leases([], [Note(episode_id=EPISODE, lease_status="closed")])
    [late] = run_file.commit([("ann", episode(1, EPISODE))]).ended
    assert late.excluded == "superseded"


def test_an_update_takes_its_episodes_once_and_in_order(run_file):
    lend(run_file, "ann", 2)
    second = "t00000002.1"
    run_file.commit([("ann", episode(1, EPISODE)), ("ann", episode(2, second))])
    run_file.begin_update(7, [second, EPISODE])
    run_file.begin_update(7, [second, EPISODE])  # a resumed learner takes it again
    with pytest.raises(RunFileError, match="already took other episodes"):
        run_file.begin_update(7, [EPISODE, second])
    run_file.finish_update(7, seeds={"minibatches": 5}, metrics={"loss": math.nan}, result=b"bits")
    with read(run_file) as reader:
        [update] = reader.updates()
        assert update.episode_ids == (second, EPISODE)
        assert (update.status, update.seeds) == ("done", {"minibatches": 5})
        assert math.isnan(update.metrics["loss"])
        assert reader.update_result(7) == b"bits"
        assert {row.consumed_by for row in reader.episodes()} == {7}
        with pytest.raises(RunFileError, match="no finished update 8"):
            reader.update_result(8)


def test_an_update_that_was_never_begun_cannot_be_finished(run_file):
    with pytest.raises(ValueError, match="never begun"):
        run_file.finish_update(3, seeds={}, metrics={}, result=b"")


def test_a_copy_that_lost_its_end_is_not_the_history_of_a_checkpoint(run_file, tmp_path):
    for version in range(3):
        run_file.begin_update(version, [])
        run_file.finish_update(version, seeds={}, metrics={"loss": 0.5}, result=b"")
    run_file.begin_update(3, [])
    with read(run_file) as reader:
        assert [row.version for row in reader.history(2)] == [0, 1]
        assert [row.version for row in reader.history(3)] == [0, 1, 2]
        with pytest.raises(RunFileError, match="has 3 of the 4 updates that its checkpoint of"):
            reader.history(4)  # taken, not done
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(run_file.path, copy)  # and not its log
    with RunReader(copy) as reader:
        assert reader.history(0) == []
        with pytest.raises(RunFileError, match=r"has 0 of the 2 .* without run\.sqlite-wal"):
            reader.history(2)


def test_a_run_goes_on_where_it_was(tmp_path):
    run_file = new_run(tmp_path)
    lend(run_file, "ann", 1, 2)
    run_file.actor_seen("ann", "host:1")
    run_file.commit([("ann", episode(1, EPISODE))])
    run_file.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.lock", "run.sqlite"]
    run_file = RunFile.open(tmp_path)
    assert run_file.last_sequence("ann") == 1
    assert run_file.commit([("ann", episode(1, EPISODE))]).ended == ()
    [ended] = run_file.commit([("ann", episode(2, "t00000002.1"))]).ended
    assert ended.excluded == ""
    with read(run_file) as reader:
        [actor] = reader.actors()
    assert (actor.name, actor.num_leases, actor.num_episodes) == ("host:1", 2, 2)
    run_file.close()


def test_a_new_run_is_refused_where_one_is(tmp_path):
    new_run(tmp_path).close()
    before = (tmp_path / "run.sqlite").read_bytes()
    with pytest.raises(RunFileError, match="already holds a run: continue it with --resume"):
        new_run(tmp_path)
    assert (tmp_path / "run.sqlite").read_bytes() == before


def test_resuming_nothing_is_refused(tmp_path):
    with pytest.raises(RunFileError, match="holds no run to resume"):
        RunFile.open(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_two_learners_cannot_write_one_run(run_file):
    with pytest.raises(RunFileError, match=f"in use by another learner .process {os.getpid()}"):
        RunFile.open(run_file.path.parent)


@pytest.mark.parametrize("end", ["moved", "removed", "replaced"])
def test_a_run_whose_folder_is_gone_does_not_go_on_into_nothing(tmp_path, end):
    folder = tmp_path / "run"
    run_file = new_run(folder)
    run_file.begin_update(0, [])
    folder.rename(tmp_path / "elsewhere")
    if end == "removed":
        shutil.rmtree(tmp_path / "elsewhere")
    elif end == "replaced":
        new_run(folder).close()
    with pytest.raises(RunFileError, match="is not there any more: the folder of a run"):
        run_file.begin_update(1, [])
    run_file.close()


def test_a_lock_that_somebody_removed_is_taken_again(run_file):
    lock = run_file.path.with_name("run.lock")
    lock.unlink()
    run_file.begin_update(0, [])
    with pytest.raises(RunFileError, match=f"another learner .process {os.getpid()}"):
        RunFile.open(run_file.path.parent)


def test_a_learner_whose_run_another_one_took_ends(run_file):
    run_file.path.with_name("run.lock").unlink()
    other = RunFile.open(run_file.path.parent)
    with pytest.raises(RunFileError, match="in use by another learner"):
        run_file.begin_update(0, [])
    other.begin_update(0, [])
    other.close()


def test_readers_read_while_the_writer_writes(tmp_path):
    """A reader in another process never waits, never fails, and sees whole deliveries only."""
    run_file = new_run(tmp_path)
    lend(run_file, "ann", *range(300))
    script = f"""
import sqlite3, sys
from pathlib import Path
from capo.learner.run_reader import RunReader
seen = 0
while seen < 300:
    with RunReader(Path({str(tmp_path)!r})) as reader:
        rows = reader.episodes()
        assert len(rows) >= seen, (len(rows), seen)
        seen = len(rows)
        for episode in reader.read_episodes([row.episode_id for row in rows[-3:]]):
            assert len(episode.steps) == episode.end.num_steps == 2
print("seen", seen)
"""
    reader = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for number in range(300):
        run_file.commit([("ann", episode(number + 1, f"t{number:08d}.1"))])
    output, errors = reader.communicate(timeout=60)
    assert output == "seen 300\n", errors
    run_file.close()


def test_the_main_thread_and_the_writer_thread_share_the_writer(tmp_path):
    run_file = new_run(tmp_path)
    lend(run_file, "ann", *range(100))

    def ingest() -> None:
        for number in range(100):
            run_file.commit([("ann", episode(number + 1, f"t{number:08d}.1", 1))])

    thread = threading.Thread(target=ingest)
    thread.start()
    for version in range(100):
        run_file.begin_update(version, [])
        run_file.finish_update(version, seeds={}, metrics={}, result=b"")
    thread.join()
    with read(run_file) as reader:
        assert len(reader.episodes()) == 100
        assert [update.status for update in reader.updates()] == ["done"] * 100
    run_file.close()


def _ingest_for_ever(folder: str, acked) -> None:
    run_file = RunFile.open(Path(folder))
    sequence = run_file.last_sequence("ann")
    while True:
        batch = []
        for _ in range(4):
            sequence += 1
            batch.append(("ann", episode(sequence, f"t{sequence:08d}.1", 3)))
        run_file.commit(batch)
        acked.send(sequence)


def test_a_killed_writer_loses_nothing_that_it_acked_and_doubles_nothing(tmp_path):
    """Ten times: kill -9 in the middle of commits, reopen, send again what was not acked."""
    run_file = new_run(tmp_path)
    lend(run_file, "ann", *range(1, 20_000))
    run_file.close()
    spawn = multiprocessing.get_context("fork")
    acked = 0
    for kill in range(10):
        receiver, sender = spawn.Pipe(duplex=False)
        child = spawn.Process(target=_ingest_for_ever, args=(str(tmp_path), sender))
        child.start()
        for _ in range(3 + kill * 2):
            acked = receiver.recv()
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        sender.close()
        while receiver.poll():
            try:
                acked = receiver.recv()
            except EOFError:
                break
        run_file = RunFile.open(tmp_path)
        stored = run_file.last_sequence("ann")
        run_file.close()
        assert acked <= stored <= acked + 4
        assert stored_steps(tmp_path) == [
            (f"t{number:08d}.1", index) for number in range(1, stored + 1) for index in range(3)
        ]
        with RunReader(tmp_path) as reader:
            assert [row.excluded for row in reader.episodes()] == [""] * stored


@pytest.fixture
def small_disk(tmp_path: Path):
    """Two mebibytes of a real file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], capture_output=True
    )
    if mount.returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_said_and_the_run_goes_on_with_room(small_disk):
    run_file = new_run(small_disk / "run")
    lend(run_file, "ann", *range(1, 1000))
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(300_000))
    with pytest.raises(StorageFullError, match="is full: make room"):
        _commit_large_episodes(run_file, 200)
    sequence = run_file.last_sequence("ann")
    assert 0 < sequence < 200
    with pytest.raises(StorageFullError):  # still full, and still usable
        run_file.commit([("ann", _large_episode(sequence + 1))])
    assert run_file.last_sequence("ann") == sequence
    with read(run_file) as reader:
        assert len(reader.episodes()) == sequence
    ballast.unlink()
    [ended] = run_file.commit([("ann", _large_episode(sequence + 1))]).ended
    assert ended.excluded == ""
    run_file.close()
    RunFile.open(small_disk / "run").close()  # checks every page


def _commit_large_episodes(run_file: RunFile, last: int) -> None:
    for sequence in range(1, last + 1):
        run_file.commit([("ann", _large_episode(sequence))])


def _large_episode(sequence: int) -> Delivery:
    name = f"t{sequence:08d}.1"
    steps = tuple(step(name, index, size=2000) for index in range(2))
    return Delivery(sequence=sequence, steps=steps, ends=(end(name, 2),))


def _commit_under_a_file_limit(folder: str, verdict) -> None:
    run_file = RunFile.open(Path(folder))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, resource.RLIM_INFINITY))
    try:
        _commit_large_episodes(run_file, 200)
    except RunFileError as error:
        verdict.send(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run_file.commit([("ann", _large_episode(run_file.last_sequence("ann") + 1))])
    run_file.close()


def test_a_write_that_fails_is_an_error_and_leaves_the_run_usable(tmp_path):
    run_file = new_run(tmp_path)
    lend(run_file, "ann", *range(1, 1000))
    run_file.close()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_commit_under_a_file_limit, args=(str(tmp_path), sender))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert "could not be read or written" in receiver.recv()
    with RunReader(tmp_path) as reader:
        rows = reader.episodes()
    assert 1 < len(rows) < 200
    assert [row.episode_id for row in rows] == [f"t{n:08d}.1" for n in range(1, len(rows) + 1)]


def _closed_run(folder: Path) -> Path:
    run_file = new_run(folder)
    lend(run_file, "ann", *range(1, 40))
    for sequence in range(1, 40):
        run_file.commit([("ann", _large_episode(sequence))])
    run_file.close()
    return folder / "run.sqlite"


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: b"", "no run file of this program"),
        (lambda data: b"some text, no database" * 100, "is damaged"),
        (lambda data: data[: len(data) // 2], "is damaged"),
        (lambda data: data[:100], "is damaged"),
        (lambda data: data[:20000] + bytes(30000) + data[50000:], "is damaged"),
    ],
    ids=["empty", "text", "half", "header", "zeroed pages"],
)
def test_a_damaged_file_is_refused_and_left_alone(tmp_path, damage, sentence):
    path = _closed_run(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    before = path.read_bytes()
    with pytest.raises(RunFileError, match=sentence) as refusal:
        RunFile.open(tmp_path)
    assert str(path) in str(refusal.value)
    assert path.read_bytes() == before


def test_a_database_of_another_program_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "run.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE run (key, value)")
    connection.close()
    before = path.read_bytes()
    for attempt in (RunFile.open, RunReader):
        with pytest.raises(RunFileError, match="no run file of this program"):
            attempt(tmp_path)
    assert path.read_bytes() == before


def test_a_file_of_another_schema_version_says_who_can_open_it(tmp_path):
    path = _closed_run(tmp_path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(RunFileError, match="schema version 99, this program reads 1"):
        RunReader(tmp_path)


def test_a_run_can_be_read_from_the_file_alone(tmp_path):
    """Copied elsewhere, in a folder that nobody may write."""
    path = _closed_run(tmp_path / "run")
    elsewhere = tmp_path / "laptop"
    elsewhere.mkdir()
    (elsewhere / "taken.sqlite").write_bytes(path.read_bytes())
    elsewhere.chmod(0o555)
    with RunReader(elsewhere / "taken.sqlite") as reader:
        assert len(reader.episodes()) == 39
    elsewhere.chmod(0o755)


def test_a_folder_without_a_run_says_so(tmp_path):
    with pytest.raises(RunFileError, match="holds no run"):
        RunReader(tmp_path)


def test_steps_that_come_after_the_end_of_their_episode_are_refused(run_file):
    late = step(EPISODE, 2)
    run_file.commit([("ann", episode(1, EPISODE)), ("ann", Delivery(sequence=2, steps=(late,)))])
    committed = run_file.commit([("ann", Delivery(sequence=3, steps=(late,)))])
    assert (committed.num_steps, committed.num_refused) == (0, 1)
    assert "its episode had ended" in committed.fault
    assert stored_steps(run_file.path.parent) == [(EPISODE, 0), (EPISODE, 1)]
    with read(run_file) as reader:
        [found] = reader.read_episodes([EPISODE])
    assert len(found.steps) == found.end.num_steps == 2


def test_a_run_file_appears_with_its_facts_or_not_at_all(tmp_path):
    """Killed right after it appeared."""
    script = f"""
import os, signal
from pathlib import Path
from capo.learner.run_file import RunFile
rename = os.rename
def kill(*paths):
    rename(*paths)
    os.kill(os.getpid(), signal.SIGKILL)
os.rename = kill
RunFile.create(Path({str(tmp_path / "run")!r}), {{"run_id": "r", "config": "c"}})
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False)
    assert killed.returncode == -signal.SIGKILL
    RunFile.open(tmp_path / "run").close()
    with RunReader(tmp_path / "run") as reader:
        assert reader.facts() == {"run_id": "r", "config": "c"}


def test_a_text_whose_bytes_were_changed_is_a_damaged_file(run_file):
    connection = sqlite3.connect(run_file.path)
    connection.execute("UPDATE run SET value = CAST(x'ff61' AS TEXT)")
    connection.commit()
    connection.close()
    with read(run_file) as reader, pytest.raises(RunFileError, match="damaged"):
        reader.facts()
