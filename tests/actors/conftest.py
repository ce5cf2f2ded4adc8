"""Tokenizers that are built or unpacked once per session."""

import lzma
import shutil
from pathlib import Path

import pytest

from capo.actors.chat import Chat
from capo.learner.tiny_model import build_tokenizer

WORDS = ["go", "take", "put", "look", "to", "the", "cup", "table", "shelf", "you", "see", "nothing"]
SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def word_tokenizer(tmp_path_factory: pytest.TempPathFactory):
    return build_tokenizer([*WORDS, "."], tmp_path_factory.mktemp("words"))


@pytest.fixture
def chat(word_tokenizer) -> Chat:
    return Chat(word_tokenizer, max_length=128)


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real Qwen3 tokenizer and chat template."""
    source = SHARED / "qwen3_tokenizer"
    if not source.exists():
        pytest.skip(f"{source} is not here")
    folder = tmp_path_factory.mktemp("qwen3")
    with lzma.open(source / "tokenizer.json.xz") as packed:
        (folder / "tokenizer.json").write_bytes(packed.read())
    shutil.copy(source / "tokenizer_config.json", folder)
    return folder


@pytest.fixture(scope="session")
def engine_world(tmp_path_factory: pytest.TempPathFactory):
    """One real engine for the whole suite: it takes 10-60 s to start."""
    from tests.actors.engine_world import EngineWorld

    world = EngineWorld(tmp_path_factory.mktemp("model"))
    yield world
    world.close()
