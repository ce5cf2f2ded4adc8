"""Who waits for whom: told by `capo status` while things hang, and by SIGQUIT."""

import ctypes
import signal
import time

from capo.launch.diagnosis import stacks_on_sigquit
from capo.launch.processes import free_port
from tests.chaos.fleet import Fleet
from tests.chaos.processes import ROOT, Forked, Spawned, capo

END_OF_STACKS = "End of the stacks."


def told(fleet: Fleet, sentence: str, limit_s: float = 30.0, of: str = "") -> str:
    """What `capo status RUN`, or status `of` an address, prints, once it says `sentence`."""
    deadline = time.monotonic() + limit_s
    number = 0
    while True:
        number += 1
        asked = Forked(
            fleet.logs / f"status-{number}.log", capo, ["status", of or str(fleet.run_dir)]
        )
        asked.wait(30)
        if asked.exit_code == 0 and sentence in asked.text():
            return asked.text()
        assert time.monotonic() < deadline, f"no {sentence!r} in:\n{asked.text()}"
        time.sleep(0.5)


def test_without_actors_it_says_that_nobody_plays(start_fleet):
    fleet = start_fleet()
    fleet.learner.wait_for("listens")
    text = told(fleet, "waits for the batch of version 0")
    assert "actors: none connected" in text


def test_a_frozen_actor_is_seen_as_silent_and_then_as_gone(start_fleet):
    fleet = start_fleet("network.dead_after_s=8.0")
    frozen = fleet.add_actor()
    fleet.wait_for_updates(1)
    frozen.process.signal(signal.SIGSTOP)
    text = told(fleet, "silent for")
    assert "actor actor-0" in text
    told(fleet, "actors: none connected", limit_s=60)
    frozen.process.signal(signal.SIGCONT)
    fleet.wait_for_updates(2)


def test_the_learner_itself_tells_over_the_network_who_waits_for_whom(start_fleet):
    fleet = start_fleet("network.dead_after_s=20.0")
    frozen = fleet.add_actor()
    fleet.wait_for_updates(1)
    frozen.process.signal(signal.SIGSTOP)
    text = told(fleet, "silent for", of=fleet.address)
    assert "the learner waits for" in text
    assert "actor actor-0" in text
    frozen.process.signal(signal.SIGCONT)
    fleet.wait_for_updates(1)
    fleet.learner.signal(signal.SIGSTOP)
    asked = Forked(fleet.logs / "asked.log", capo, ["status", fleet.address])
    assert asked.wait(30) == 1
    assert "frozen or stuck" in asked.text()
    fleet.learner.signal(signal.SIGCONT)
    fleet.wait_for_updates(1)


def test_a_broadcast_that_hangs_names_whom_it_waits_for(start_fleet):
    fleet = start_fleet("network.dead_after_s=20.0", "weight_sync.transfer_timeout_s=8.0")
    fleet.add_actor()
    frozen = fleet.add_actor()
    fleet.wait_for_updates(1)
    frozen.process.signal(signal.SIGSTOP)
    text = told(fleet, "the broadcast waits for")
    assert "actor-1" in text.partition("the broadcast waits for")[2].splitlines()[0]
    frozen.process.signal(signal.SIGCONT)
    fleet.wait_for_updates(2)


def test_a_hanging_environment_shows_as_an_old_wait_for_its_actor(start_fleet):
    fleet = start_fleet(
        'environment.options.fault="hang"',
        "environment.options.fault_every=1",
        "rollout.env_timeout_s=60.0",
    )
    fleet.add_actor()
    text = told(fleet, "to end episode")
    assert "the scheduler waits for actor actor-0" in text


def test_a_dead_learner_is_not_reported_as_working(start_fleet):
    fleet = start_fleet()
    fleet.learner.wait_for("listens")
    told(fleet, "waits for the batch")
    fleet.learner.kill()
    text = told(fleet, "No learner is at work")
    assert f"capo run --resume {fleet.run_dir}" in text


def test_a_frozen_learner_is_reported_as_silent(start_fleet):
    fleet = start_fleet()
    fleet.learner.wait_for("listens")
    told(fleet, "waits for the batch")
    fleet.learner.signal(signal.SIGSTOP)
    text = told(fleet, "has not reported for")
    fleet.learner.signal(signal.SIGCONT)
    assert f"pid {fleet.learner.pid}" in text


def test_sigquit_prints_the_stacks_of_a_learner_and_it_goes_on(start_fleet):
    fleet = start_fleet()
    fleet.add_actor()
    fleet.wait_for_updates(1)
    fleet.learner.signal(signal.SIGQUIT)
    fleet.learner.wait_for(END_OF_STACKS)
    text = fleet.learner.text()
    assert "Stack of thread MainThread" in text
    assert "learner/loop.py" in text
    assert text.count("Stack of thread ") >= 3  # the server's and the writer's
    assert "Stack for <Task" in text
    assert "protocol/server.py" in text
    fleet.wait_for_updates(2)


def test_a_busy_learner_survives_hundreds_of_sigquits(start_fleet):
    """`faulthandler.register` would not do: it ends a busy process within seconds of this."""
    fleet = start_fleet()
    fleet.add_actor()
    fleet.wait_for_updates(1)
    deadline = time.monotonic() + 60
    while fleet.learner.text().count(END_OF_STACKS) < 300:
        assert time.monotonic() < deadline, fleet.learner.tail()
        fleet.learner.signal(signal.SIGQUIT)
        time.sleep(0.01)
    fleet.wait_for_updates(2)


def test_sigquit_shows_a_main_thread_that_is_stuck(tmp_path):
    stuck = Forked(tmp_path / "stuck.log", stuck_in_c)
    try:
        stuck.wait_for("about to hang")
        stuck.signal(signal.SIGQUIT)
        stuck.wait_for(END_OF_STACKS, timeout_s=10)
        assert "in stuck_in_c" in stuck.text()
    finally:
        stuck.kill()


def stuck_in_c() -> int:
    """It locks a mutex of the C library twice, so that no handler of Python's can ever run."""
    stacks_on_sigquit()
    print("about to hang")
    mutex = ctypes.create_string_buffer(64)  # zeros are an unlocked mutex
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
    return ctypes.CDLL(None).pthread_mutex_lock(mutex)


def test_sigquit_prints_the_stacks_and_tasks_of_an_actor_and_it_goes_on(tmp_path):
    address = f"tcp://127.0.0.1:{free_port()}"
    actor = Forked(tmp_path / "actor.log", capo, ["actor", "--connect", address, "--name", "lone"])
    try:
        actor.wait_for("waiting for the learner", timeout_s=120)
        actor.signal(signal.SIGQUIT)
        actor.wait_for(END_OF_STACKS)
        assert "actors/worker.py" in actor.text()
        assert "Stack for <Task" in actor.text()
        asked = actor.text().count("waiting for the learner")
        deadline = time.monotonic() + 60
        while actor.text().count("waiting for the learner") == asked:
            assert time.monotonic() < deadline, actor.tail()
            time.sleep(0.2)
        actor.signal(signal.SIGINT)
        assert actor.wait(30) == 0
    finally:
        actor.kill()


def test_sigquit_of_capo_run_asks_its_learner_and_its_actors(tmp_path):
    """A terminal's Ctrl-\\ reaches `capo run` alone: the others are in sessions of their own."""
    run_dir = tmp_path / "run"
    config = str(ROOT / "tests" / "chaos" / "chaos.toml")
    running = Spawned(tmp_path / "run.log", "run", config, "--set", f'run_dir="{run_dir}"')
    actor_log = run_dir / "logs" / "actor-0.log"
    try:
        running.wait_for("listens", timeout_s=120)
        running.signal(signal.SIGQUIT)
        running.wait_for("writes its stacks")
        running.wait_for("Stack for <Task")  # the learner's, on this terminal
        deadline = time.monotonic() + 60
        while END_OF_STACKS not in actor_log.read_text():
            assert time.monotonic() < deadline, actor_log.read_text()
            time.sleep(0.2)
        assert running.exit_code is None
        running.signal(signal.SIGINT)
        assert running.wait(120) == 130
    finally:
        running.kill()
