"""What a checkpoint keeps besides the models: `trainer.json` and every rank's optimizer state.

Knows no model and no engine; the exports beside it are hf_checkpoint's.
"""

import hashlib
from pathlib import Path

import msgspec
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from capo.learner.ranks import Ranks
from capo.protocol.errors import CheckpointError

FORMAT = 1
_FILE_NAME = "trainer.json"


class TrainerState(Struct, frozen=True, kw_only=True):
    """What must agree before the tensors are worth reading: everything but the version."""

    format: int = FORMAT
    version: int  # of the policy
    zero_stage: int
    world_size: int
    has_critic: bool
    reference_digest: str  # of the policy that the KL term and version 0 refer to


def write_state(folder: Path, state: TrainerState) -> None:
    (folder / _FILE_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(state)))


def read_state(folder: Path, here: TrainerState) -> TrainerState:
    """What `write_state` wrote.

    Raises CheckpointError if it is missing or damaged, or does not agree with the trainer `here`.
    """
    try:
        state = msgspec.json.decode((folder / _FILE_NAME).read_bytes(), type=TrainerState)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {error}") from error
    for field, expected in msgspec.structs.asdict(here).items():
        found = getattr(state, field)
        if field != "version" and found != expected:
            raise CheckpointError(
                f"the checkpoint {folder} was written with {field}={found}, but this run has "
                f"{expected}; resume it with the configuration it was trained with"
            )
    return state


def optimizer_file(folder: Path, model: str, ranks: Ranks) -> Path:
    """Where this rank's part of a model's optimizer state lies."""
    rank = f"{ranks.rank}-of-{ranks.world_size}"
    return folder / "optimizer" / f"{model}-rank-{rank}.safetensors"


def read_optimizer(folder: Path, model: str, ranks: Ranks) -> dict[str, Tensor]:
    """Raises CheckpointError if this rank's file is missing or damaged."""
    try:
        return load_file(optimizer_file(folder, model, ranks))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint {folder} cannot be loaded: {error}") from error


def weights_digest(folder: Path) -> str:
    """sha256 over the names and contents of a Hugging Face folder's weight files."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(path.name.encode())
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
