"""What a learner sends to actors so that they need nothing but an address: read, and tried once."""

import hashlib
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from capo.actors.chat import load_chat
from capo.configs.schema import RunConfig
from capo.envs.api import Message
from capo.learner.model_files import COPY_AGAIN, damaged
from capo.protocol.errors import ConfigError
from capo.protocol.messages import ActorSetup

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def actor_setup(config: RunConfig, folder: Path) -> ActorSetup:
    """The setup of a run whose model's config.json and tokenizer lie in `folder`.

    Raises:
        ConfigError: the folder is no Hugging Face model with a fast tokenizer, or a file of the
            tokenizer is damaged: every actor would fail at it.
    """
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigError(
                f"{folder} has no {name}: model.path must be a Hugging Face folder with a fast "
                "tokenizer."
            )
    files = {
        name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()
    }
    setup = ActorSetup(
        environment=config.environment.factory,
        environment_options=msgspec.json.encode(config.environment.options),
        rollout=msgspec.json.encode(config.rollout),
        model_config=(folder / "config.json").read_bytes(),
        model_dtype=config.model.dtype,
        max_length=config.model.max_length,
        tokenizer_files=files,
        tokenizer_digest=tokenizer_digest(files),
        seed=config.seed,
        enable_thinking=config.model.enable_thinking,
    )
    _try_tokenizer(setup, folder)
    return setup


def _try_tokenizer(setup: ActorSetup, folder: Path) -> None:
    """As an actor will load and use it. What these libraries raise for damaged files is of any
    type, bare Exceptions included."""
    for name, content in setup.tokenizer_files.items():
        if name.endswith(".json"):
            try:
                msgspec.json.decode(content, type=dict[str, msgspec.Raw])
            except msgspec.DecodeError as error:
                raise damaged(folder / name, error) from error
    try:
        Tokenizer.from_buffer(setup.tokenizer_files["tokenizer.json"])
    except Exception as error:
        raise damaged(folder / "tokenizer.json", error) from error
    try:
        load_chat(setup).render([Message("user", "hello")], ())
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ConfigError(
            f"the tokenizer in {folder} cannot be used ({reason}): check chat_template.jinja and "
            f"tokenizer_config.json there, or {COPY_AGAIN}."
        ) from error


def tokenizer_digest(files: dict[str, bytes]) -> str:
    """Equal for equal tokenizers and chat templates: sha256 over names and contents."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return digest.hexdigest()
