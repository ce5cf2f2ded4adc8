"""The command line: what it refuses, it refuses in one sentence, with exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest

from capo.configs.load import load, to_json
from capo.learner.run_file import RunFile

ROOT = Path(__file__).parents[2]


def capo(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "capo.launch.main", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "nowhere.toml"], ["nowhere.toml", "quickstart"]),
        (["check", "quickstart", "--set", "learner.tokenbudget=1"], ["token_budget"]),
        (["check", "quickstart", "--set", "learner.token_budget=-1"], ["positive", "-1"]),
        (["check", "quickstart", "--set", "algorithm=grop"], ["grop", "grpo"]),
        (["run"], ["CONFIG", "--resume"]),
        (["learner", "quickstart", "--resume", "x"], ["CONFIG", "--resume"]),
        (["learner", "--resume", "no_such_run"], ["no_such_run"]),
        (["actor", "--connect", "nonsense"], ["nonsense", "tcp://"]),
        (["actor", "--connect", "runs/x", "--keys", "no.key"], ["no.key"]),
        (["actor", "--connect", "runs/x", "--give-up-after", "-1"], ["--give-up-after", "-1"]),
        (["actor", "--connect", "runs/x", "--give-up-after", "nan"], ["--give-up-after", "nan"]),
        (["actor", "--connect", "tcp://192.0.2.1:5555"], ["--keys", "--insecure"]),
        (["check", "quickstart", "--set", "environment.options.place=3"], ["place", "places"]),
        (
            [
                "check",
                "quickstart",
                "--set",
                "network.bind=tcp://0.0.0.0:5555",
                "--set",
                "network.weights_host=192.0.2.1",
            ],
            ["0.0.0.0", "capo keygen"],
        ),
        (
            ["check", "quickstart", "--set", "network.bind=tcp://192.0.2.1:5555"],
            ["weights_host", "127.0.0.1"],
        ),
        (["replay", "no_such_run"], ["no_such_run"]),
        (["report", "no_such_run"], ["no_such_run"]),
        (["status", "no_such_run"], ["no_such_run"]),
        (["status", "somewhere", "--insecure"], ["--insecure", "address"]),
        (["status", "tcp://nowhere"], ["tcp://HOST:PORT"]),
        (["status", "tcp://192.0.2.1:5555"], ["--keys", "--insecure"]),
        (["status", "tcp://127.0.0.1:5555", "--keys", "no.key"], ["no.key"]),
        (["export", "no_such_run"], ["no_such_run"]),
        (["eval", "no_such_run"], ["no_such_run"]),
        (["convert", "no_such.gguf", "somewhere"], ["no_such.gguf"]),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments: list[str], words: list[str]) -> None:
    done = capo(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"capo {arguments[0]}: ")
    assert len(done.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in done.stderr


def test_a_learner_does_not_start_over_a_run_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "run.sqlite").write_bytes(b"somebody's data")
    done = capo("learner", "quickstart", "--set", f'run_dir="{tmp_path}"')
    assert done.returncode == 2
    assert "--resume" in done.stderr
    assert (tmp_path / "run.sqlite").read_bytes() == b"somebody's data"


@pytest.mark.parametrize("changed", [[], ["--set", "algorithm.trace_steps=3"]])
def test_a_learner_says_first_which_changes_nothing_reads(
    tmp_path: Path, changed: list[str]
) -> None:
    (tmp_path / "run.sqlite").write_bytes(b"so that it ends there")
    done = capo("learner", "quickstart", "--set", f'run_dir="{tmp_path}"', *changed)
    assert done.returncode == 2
    expected = "Without effect under this algorithm: trace_steps=3 (see capo check).\n"
    assert done.stdout == (expected if changed else "")


@pytest.mark.parametrize("command", ["status", "report", "eval"])
def test_a_run_of_a_newer_version_is_told_as_such(tmp_path: Path, command: str) -> None:
    config = to_json(load("quickstart")).replace(b'"seed":', b'"sead":')
    facts = {"run_id": "r", "config": config.decode(), "version.capo-rl": "99.0"}
    RunFile.create(tmp_path, facts).close()
    before = (tmp_path / "run.sqlite").read_bytes()
    done = capo(command, str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert "sead" in done.stderr
    assert "written by 99.0" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert (tmp_path / "run.sqlite").read_bytes() == before


def test_a_file_that_is_no_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run.sqlite").write_bytes(b"not a database" * 100)
    for command in ("status", "replay", "report", "export", "eval", "learner --resume"):
        done = capo(*command.split(), str(tmp_path))
        assert done.returncode == 2, done.stderr
        assert "run.sqlite" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    assert (tmp_path / "run.sqlite").read_bytes() == b"not a database" * 100


def test_check_prints_the_resolved_configuration_and_the_plan() -> None:
    done = capo("check", "quickstart", "--set", "scheduler.max_staleness=0")
    assert done.returncode == 0, done.stderr
    assert "max_staleness = 0" in done.stdout
    assert "synchronous" in done.stdout
    assert "optimizer step(s)" in done.stdout


def test_keygen_makes_files_that_only_their_owner_reads(tmp_path: Path) -> None:
    done = capo("keygen", str(tmp_path / "keys"), "--actors", "2")
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "keys").iterdir())
    assert [file.name for file in files] == ["actor-0.key", "actor-1.key", "learner.key"]
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)
    assert capo("keygen", str(tmp_path / "keys")).returncode == 2
    assert "actor-9.key" in capo("keygen", str(tmp_path / "keys"), "--add", "actor-9").stdout
