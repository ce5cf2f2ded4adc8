"""Where a learner is, and how its actors find it."""

import json
import threading
import time

import pytest

from capo.launch.address import FollowsRun, await_address, is_run_folder, reachable
from capo.launch.run_directory import read_address, write_address
from capo.protocol.errors import ConfigError, PeerLostError
from tests.chaos.processes import ROOT, Spawned

HERE, THERE, ELSEWHERE = "tcp://127.0.0.1:5555", "tcp://127.0.0.1:6666", "tcp://10.0.0.9:5555"


def test_the_address_of_a_run_is_what_its_learner_wrote_last(tmp_path):
    assert read_address(tmp_path / "nothing") is None
    write_address(tmp_path, HERE)
    write_address(tmp_path, THERE)
    assert read_address(tmp_path) == THERE


@pytest.mark.parametrize("damaged", [b"", b'{"address": "tcp://1', b"[1]", b"\xff\xfe"])
def test_a_file_that_cannot_be_read_keeps_the_address_that_was_known(tmp_path, damaged):
    follows = FollowsRun(tmp_path, HERE, guarded=False)
    (tmp_path / "learner.json").write_bytes(damaged)
    assert follows() == HERE
    write_address(tmp_path, THERE)
    assert follows() == THERE
    (tmp_path / "learner.json").unlink()
    assert follows() == THERE


@pytest.mark.parametrize(
    ("place", "is_folder"),
    [
        ("tcp://127.0.0.1:5555", False),
        ("localhost:5555", False),
        ("tcp:/10.0.0.1:5555", False),
        ("nonsense", False),
        ("runs/mine", True),
        ("/shared/runs/not-there-yet", True),
        ("docs", True),
    ],
)
def test_a_folder_is_told_from_an_address(place, is_folder, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert is_run_folder(place) == is_folder


def test_nobody_follows_to_another_machine_without_keys(tmp_path):
    write_address(tmp_path, ELSEWHERE)
    with pytest.raises(ConfigError, match=r"tcp://10\.0\.0\.9:5555 is another machine"):
        FollowsRun(tmp_path, HERE, guarded=False)()
    assert FollowsRun(tmp_path, HERE, guarded=True)() == ELSEWHERE


def test_nobody_follows_to_what_is_no_address(tmp_path):
    (tmp_path / "learner.json").write_text(json.dumps({"address": "ipc:///tmp/x", "pid": 1}))
    with pytest.raises(ConfigError, match="is neither an address"):
        FollowsRun(tmp_path, HERE, guarded=True)()


def test_a_run_whose_learner_has_not_begun_is_waited_for(tmp_path):
    said = []
    threading.Timer(0.3, write_address, (tmp_path, HERE)).start()
    assert await_address(tmp_path, 30.0, said.append) == HERE
    assert said == [f"waiting for a learner to leave its address in {tmp_path}"]


def test_the_wait_for_a_learner_has_the_limit_that_was_given(tmp_path):
    started = time.monotonic()
    actor = Spawned(
        tmp_path / "log", "actor", "--connect", str(tmp_path / "run"), "--give-up-after", "1"
    )
    assert actor.wait(60) == 1
    assert time.monotonic() - started < 60
    assert f"no learner left its address in {tmp_path / 'run'} within 1 s" in actor.text()
    with pytest.raises(PeerLostError, match=r"within 0\.1 s"):
        await_address(tmp_path / "run", 0.1, lambda line: None)


def test_others_get_an_address_that_they_can_reach():
    assert reachable(HERE) == HERE
    assert reachable("tcp://[::1]:5555") == "tcp://[::1]:5555"
    for everywhere in ("tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://[::]:5555"):
        host, _, port = reachable(everywhere).removeprefix("tcp://").rpartition(":")
        assert port == "5555"
        assert host not in ("0.0.0.0", "*", "[::]")
