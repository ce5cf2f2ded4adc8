"""Whether a Hugging Face folder is whole, asked before anything begins with it. Reads no tensor.

A damaged file becomes one sentence that names it. That the weights' bytes are the right ones is
known only where a digest was kept (see checkpoint).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import torch
from msgspec import Meta, Struct
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from capo.protocol.errors import ConfigError

Record = TypeVar("Record", bound=Struct)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
COPY_AGAIN = "copy that file again from where the model came from"


class ModelDescription(Struct, frozen=True):
    """What we read in config.json ourselves; the rest is transformers' and vLLM's."""

    vocab_size: Annotated[int, Meta(gt=0)]


class WeightIndex(Struct, frozen=True):
    """Of weights that lie in several files."""

    weight_map: dict[str, str]  # file by tensor


def require_whole_model(folder: Path, remedy: str = COPY_AGAIN) -> None:
    """config.json can be used, and the weights are safetensors of its shapes, to the last byte.

    Raises ConfigError with a sentence that names the file and ends in `remedy`.
    """
    expected = _expected_shapes(folder, remedy)
    for path in _weight_files(folder, remedy):
        for name, shape in _shapes(path, remedy).items():
            if name in expected and expected[name] != shape:
                raise ConfigError(
                    f"{path} has {name} with shape {list(shape)}, but {folder / 'config.json'} "
                    f"describes {list(expected[name])}: {remedy}."
                )


def _expected_shapes(folder: Path, remedy: str) -> dict[str, tuple[int, ...]]:
    path = folder / "config.json"
    _decode(path, ModelDescription, remedy)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    except Exception as error:  # a model's code meets nonsense in whatever way it does
        raise damaged(path, error, remedy) from error


def _weight_files(folder: Path, remedy: str) -> Sequence[Path]:
    """Those that transformers would read."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        raise ConfigError(
            f"{folder} has no {WEIGHTS}: weights must be safetensors, a pickle is not read; "
            f"{remedy}."
        )
    files = set(_decode(folder / INDEX, WeightIndex, remedy).weight_map.values())
    for name in sorted(files):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} has no {name}, which {INDEX} names: {remedy}.")
    return [folder / name for name in sorted(files)]


def _shapes(path: Path, remedy: str) -> Mapping[str, tuple[int, ...]]:
    try:
        with safe_open(path, "np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise damaged(path, error, remedy) from error


def _decode(path: Path, type_: type[Record], remedy: str) -> Record:
    if not path.is_file():
        raise ConfigError(f"{path.parent} has no {path.name}: {remedy}.")
    try:
        return msgspec.json.decode(path.read_bytes(), type=type_)
    except msgspec.DecodeError as error:
        raise damaged(path, error, remedy) from error


def damaged(path: Path, error: Exception, remedy: str = COPY_AGAIN) -> ConfigError:
    """A sentence for `error`, which came of reading `path`."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ConfigError(f"{path} is damaged ({reason.rstrip('.:')}): {remedy}.")
