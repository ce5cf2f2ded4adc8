"""Hundreds of damaged run files: every command that reads one answers, or says one sentence."""

import random
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from capo.launch.main import main
from capo.learner.evaluation_round import ModeResult
from capo.learner.run_file import RunFile
from capo.learner.run_schema import FILE_NAME
from capo.learner.tiny_model import build_tokenizer
from tests.factories import batch_of_episodes, run_config, tiny_policy
from tests.learner.recorded_run import deliver, record

NUM_DAMAGES = 150
NUM_REPLAYED = 12  # updates that are computed again, as far as they can be read
PAGE = 16384
SECTOR = 512


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two updates, one episode that waits, one evaluation; no checkpoint, no starting policy."""
    folder = tmp_path_factory.mktemp("recorded")
    model = tiny_policy(folder / "policy")
    build_tokenizer(["go", "take"], model)
    run_dir = folder / "run"
    run_dir.mkdir()
    batches = [batch_of_episodes(6, seed=seed) for seed in range(2)]
    record(run_dir, run_config(updates=2), model, batches, every=9)
    run_file = RunFile.open(run_dir)
    deliver(run_file, 99, batch_of_episodes(1, seed=9)[0])
    number = run_file.begin_evaluation(2, ["greedy"], ["game-1"])
    result = ModeResult(
        episodes=9, given_up=0, success=0.5, success_stderr=0.1, mean_return=1.0, mean_steps=2.0
    )
    run_file.finish_evaluation(number, msgspec.json.encode({"greedy": result}))
    run_file.close()
    return run_dir / FILE_NAME


def used_places(content: bytes) -> list[int]:
    """Most of a small file is empty."""
    return [place for place, byte in enumerate(content) if byte]


def damaged(content: bytes, used: Sequence[int], generator: random.Random) -> bytes:
    """Some bits, a run of bytes, a sector, a page or the file's end are not what was written."""
    changed = bytearray(content)
    match generator.randrange(6):
        case 0:
            for _ in range(generator.choice((1, 3, 30))):
                changed[generator.choice(used)] ^= 1 << generator.randrange(8)
        case 1:
            for _ in range(generator.choice((1, 3, 30))):
                changed[generator.choice(used)] = generator.randrange(256)
        case 2:
            start = generator.choice(used)
            length = min(generator.choice((4, 40)), len(changed) - start)
            changed[start : start + length] = generator.randbytes(length)
        case 3:
            start = generator.choice(used) // SECTOR * SECTOR
            changed[start : start + SECTOR] = bytes(SECTOR)
        case 4:
            start = generator.randrange(len(changed) // PAGE) * PAGE
            changed[start : start + PAGE] = bytes(PAGE)
        case 5:
            del changed[generator.randrange(len(changed)) :]
    return bytes(changed)


def commands(run_dir: Path) -> list[list[str]]:
    return [
        ["status", str(run_dir)],
        ["report", str(run_dir)],
        ["export", str(run_dir)],
        ["replay", str(run_dir)],
        ["replay", str(run_dir), "--update", "1"],
        ["eval", str(run_dir)],  # there is no checkpoint, so it reads the run and says so
        ["learner", "--resume", str(run_dir)],  # nor such an environment
    ]


def test_every_command_answers_or_says_one_sentence(
    recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    generator = random.Random(0)
    content = recorded.read_bytes()
    used = used_places(content)
    file = tmp_path / FILE_NAME
    codes = Counter[tuple[str, int]]()
    for number in range(NUM_DAMAGES):
        broken = damaged(content, used, generator)
        file.write_bytes(broken)
        for arguments in commands(tmp_path):
            code = main(arguments)
            told = capfd.readouterr().err
            case = f"damage {number}, {arguments}: {code}, {told}"
            assert code in (0, 1, 2), case
            assert len(told.strip().splitlines()) == (code != 0), case
            assert "Traceback" not in told, case
            assert file.read_bytes() == broken, case
            codes[arguments[0], code] += 1
        for left in tmp_path.iterdir():
            left.unlink()
    for command in ("status", "report", "export", "replay"):  # some read on, some could not
        assert min(codes[command, 0], codes[command, 2]) > NUM_DAMAGES / 5, codes


def test_a_damaged_update_is_computed_again_or_refused(
    recorded: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    generator = random.Random(1)
    content = recorded.read_bytes()
    used = used_places(content)
    shutil.copytree(recorded.with_name("model"), tmp_path / "model")
    for number in range(NUM_REPLAYED):
        (tmp_path / FILE_NAME).write_bytes(damaged(content, used, generator))
        code = main(["replay", str(tmp_path), "--update", "1"])
        told = capfd.readouterr().err.splitlines()
        refusals = [line for line in told if line.startswith("capo replay: ")]
        assert code in (0, 1, 2), number
        assert len(refusals) == (code == 2), told
