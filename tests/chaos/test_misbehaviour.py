"""What goes wrong at an actor ends one episode with its own status; the run goes on or says why."""

import contextlib
import resource
import socket

import pytest

from tests.chaos.fleet import Fleet, settings
from tests.chaos.processes import Forked, capo

UPDATES = 3
SHORT = (f"updates={UPDATES}", "rollout.env_timeout_s=0.5", "scheduler.max_attempts=2")


def world(fault: str, every: int = 6) -> tuple[str, ...]:
    return (
        *SHORT,
        f'environment.options.fault="{fault}"',
        f"environment.options.fault_every={every}",
    )


def finish(fleet: Fleet) -> None:
    assert fleet.learner.wait(120) == 0, fleet.learner.tail()
    assert fleet.updates() == UPDATES
    for actor in fleet.actors:
        assert actor.process.wait(60) == 0, actor.process.tail()


def failed(fleet: Fleet, status: str) -> list[str]:
    """Errors of the episodes of this status; none of them may have been trained on."""
    rows = fleet.query(
        f"SELECT error, consumed_by, excluded FROM episodes WHERE status = '{status}'"
    )
    assert all(consumed_by is None and excluded == status for _, consumed_by, excluded in rows)
    return [error for error, _, _ in rows]


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("raise", "RuntimeError: the kitchen burns"),
        ("hang", "step did not return within rollout.env_timeout_s = 0.5 s"),
        ("nan", "nan as reward"),
        ("word", "'well done' as reward"),
        ("nonsense", "a str, not a Transition"),
        ("text", "10,000,000 characters"),
    ],
)
def test_an_environments_fault_ends_its_episode_and_the_run_goes_on(start_fleet, fault, sentence):
    fleet = start_fleet(*world(fault))
    fleet.add_actor()
    finish(fleet)
    errors = failed(fleet, "env_error")
    assert errors
    assert all(sentence in error for error in errors)
    trained = fleet.query("SELECT episode_id FROM episodes WHERE consumed_by IS NOT NULL")
    assert len(trained) == 12 * UPDATES


def test_an_environment_that_blocks_its_loop_does_not_cost_the_run(start_fleet):
    """The learner gives the actor up meanwhile; it comes back, and nothing is trained twice."""
    fleet = start_fleet(*world("block", every=24))
    fleet.add_actor()
    fleet.add_actor()
    assert fleet.learner.wait(120) == 0, fleet.learner.tail()
    assert "nothing was heard from it" in fleet.learner.text()
    trained = fleet.query("SELECT lease_id FROM episodes WHERE consumed_by IS NOT NULL")
    assert len(trained) == len(set(trained)) == 12 * UPDATES


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("nan", "a log-prob of nan for a token"),
        ("empty", "without a token"),
        ("raise", "RuntimeError: illegal memory access"),
    ],
)
def test_an_engines_fault_ends_its_episode_and_the_run_goes_on(start_fleet, fault, sentence):
    fleet = start_fleet(*SHORT)
    fleet.add_actor(fault=fault, fault_every=24)
    finish(fleet)
    errors = failed(fleet, "engine_error")
    assert errors
    assert all(sentence in error for error in errors)


def test_an_engine_that_dies_ends_its_actor_and_others_play_on(start_fleet):
    fleet = start_fleet(*SHORT)
    doomed = fleet.add_actor(fault="die", fault_every=8)
    doomed.doomed = True
    fleet.wait(
        lambda: doomed.process.exit_code is not None or fleet.updates() == UPDATES, "it died"
    )
    fleet.actors.remove(doomed)
    fleet.add_actor()
    assert doomed.process.wait(60) == 1
    assert "stops: the inference engine's process died" in doomed.process.text()
    finish(fleet)


def test_a_prompt_too_long_for_the_model_truncates_and_is_counted(start_fleet):
    fleet = start_fleet(*SHORT, "environment.options.turns=60", "model.max_length=64")
    fleet.add_actor()
    finish(fleet)
    rows = fleet.query("SELECT status, json_extract(metrics, '$.overlong') FROM episodes")
    assert {tuple(row) for row in rows} == {("truncated", 1.0)}


def test_too_many_failures_stop_the_run_with_counts_and_the_last_error(start_fleet):
    fleet = start_fleet(
        *world("raise", every=1), "scheduler.error_window=16", "scheduler.max_error_fraction=0.5"
    )
    actor = fleet.add_actor()
    assert fleet.learner.wait(60) == 1
    text = fleet.learner.text()
    assert "9 of the last 9 episodes failed" in text
    assert "the kitchen burns" in text
    assert "Traceback" not in text
    assert actor.process.wait(60) == 0  # sent home, not left to wait
    assert "the run ended: 9 of the last 9 episodes failed" in actor.process.text()


def capo_with_few_files(arguments: list[str]) -> int:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (96, most))
    return capo(arguments)


def test_strangers_that_connect_and_say_nothing_do_not_use_up_the_learners_files(start_fleet):
    fleet = start_fleet(f"updates={UPDATES}")
    fleet.learner.wait_for("listens")
    fleet.learner.kill()
    fleet.learner = Forked(
        fleet.logs / "few.log",
        capo_with_few_files,
        ["learner", "--resume", str(fleet.run_dir), *settings(f'network.bind="{fleet.address}"')],
    )
    fleet.learner.wait_for("listens")
    host, port = fleet.address.removeprefix("tcp://").split(":")
    with contextlib.ExitStack() as strangers:
        for _ in range(150):
            strangers.enter_context(socket.create_connection((host, int(port)), timeout=5))
        fleet.add_actor()
        finish(fleet)
