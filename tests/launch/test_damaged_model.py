"""A damaged model folder ends a start with one sentence, and the corrected start works there."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from capo.launch.main import main
from capo.learner.tiny_model import build_tokenizer
from tests.factories import tiny_policy

CONFIG = """
name = "damaged"
updates = 0
run_dir = "{run_dir}"
[environment]
factory = "capo.envs.household:make"
[model]
path = "{model}"
dtype = "float32"
max_length = 256
[rollout]
max_action_tokens = 8
[algorithm]
preset = "rloo"
kl_coefficient = 0.0
[evaluation]
games = 0
"""


def cut(name: str, length: int | None = None) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        file = folder / name
        os.truncate(file, file.stat().st_size // 2 if length is None else length)

    return damage


def write(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return damage


def change(name: str, **values: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_bytes())
        (folder / name).write_text(json.dumps({**content, **values}))

    return damage


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def lose_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    )


DAMAGES = {
    "tokenizer cut": ("tokenizer.json", cut("tokenizer.json")),
    "tokenizer empty object": ("tokenizer.json", write("tokenizer.json", b"{}")),
    "tokenizer no text": ("tokenizer.json", write("tokenizer.json", b"\xff" * 50)),
    "tokenizer missing": ("tokenizer.json", remove("tokenizer.json")),
    "tokenizer config cut": ("tokenizer_config.json", cut("tokenizer_config.json")),
    "tokenizer config a list": ("tokenizer_config.json", write("tokenizer_config.json", b"[]")),
    "no chat template": ("chat_template.jinja", remove("chat_template.jinja")),
    "chat template cut": ("chat_template.jinja", cut("chat_template.jinja")),
    "config cut": ("config.json", cut("config.json")),
    "config empty": ("config.json", write("config.json", b"")),
    "config empty object": ("config.json", write("config.json", b"{}")),
    "config of an unknown model": ("config.json", change("config.json", model_type="none such")),
    "config without heads": ("config.json", change("config.json", num_attention_heads=0)),
    "config of another size": ("config.json", change("config.json", vocab_size=7)),
    "generation config cut": ("generation_config.json", cut("generation_config.json")),
    "weights cut": ("model.safetensors", cut("model.safetensors")),
    "weights without a header": ("model.safetensors", cut("model.safetensors", 5)),
    "weights missing": ("model.safetensors", remove("model.safetensors")),
    "a shard missing": ("model-2.safetensors", lose_a_shard),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_policy(tmp_path_factory.mktemp("whole") / "model", vocabulary=300)
    build_tokenizer(["go", "take"], model)
    return model


def start(folder: Path, model: Path) -> int:
    """`capo learner` with nothing to train: it ends at once when its model is whole."""
    config = folder / "config.toml"
    config.write_text(CONFIG.format(run_dir=folder / "run", model=model))
    return main(["learner", str(config)])


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def one_sentence(capfd: pytest.CaptureFixture[str]) -> str:
    [line] = capfd.readouterr().err.strip().splitlines()
    assert line.startswith("capo learner: ")
    return line


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_model_is_one_sentence_and_a_corrected_start_works(
    kind: str, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name, damage = DAMAGES[kind]
    model = tmp_path / "model"
    shutil.copytree(whole, model)
    damage(model)
    before = contents(model)
    assert start(tmp_path, model) == 2
    assert name in one_sentence(capfd)
    assert contents(model) == before
    assert not (tmp_path / "run").exists()


def test_a_corrected_start_works_in_the_same_folder_and_a_damaged_copy_is_told_at_resume(
    whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(whole, model)
    (model / "config.json").write_text("{")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert start(tmp_path, model) == 2
    one_sentence(capfd)
    shutil.copy(whole / "config.json", model)
    assert start(tmp_path, model) == 0
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    capfd.readouterr()

    for name, damage in DAMAGES.values():
        if name.startswith("model-"):
            continue
        shutil.rmtree(tmp_path / "run" / "model")
        shutil.copytree(whole, tmp_path / "run" / "model")
        damage(tmp_path / "run" / "model")
        before = contents(tmp_path / "run")
        assert main(["learner", "--resume", str(tmp_path / "run")]) == 2
        assert name in one_sentence(capfd)
        assert contents(tmp_path / "run") == before


def test_a_start_that_failed_after_its_model_was_copied_leaves_no_copy(
    whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(whole, model)
    change("config.json", final_logit_softcapping=30.0)(model)  # whole, but not for this learner
    assert start(tmp_path, model) == 2
    assert "final_logit_softcapping" in one_sentence(capfd)
    assert not (tmp_path / "run").exists()
    assert start(tmp_path, whole) == 0
    assert (tmp_path / "run" / "model" / "config.json").read_bytes() == (
        whole / "config.json"
    ).read_bytes()


def test_a_folder_with_somebodys_model_is_not_taken_for_the_runs(
    whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole, tmp_path / "run" / "model")
    before = contents(tmp_path / "run")
    assert start(tmp_path, whole) == 2
    assert "another run_dir" in one_sentence(capfd)
    assert contents(tmp_path / "run") == before
