"""Policy and critic as Hugging Face folders, for transformers and vLLM.

Both load them as they are: config, safetensors weights, the tokenizer with its chat template.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


def export(
    model: PreTrainedModel,
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    tokenizer_from: Path,
    folder: Path,
    *,
    write: bool = True,
) -> None:
    """Writes `weights` (full tensors under the model's names) in `dtype`, and what goes with them.

    Every rank takes part in gathering the weights; only one may `write`. The tokenizer's files
    are copied, not rewritten, so that its digest stays the same.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights:
        if write:
            tensors[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
    if not write:
        return
    for name, buffer in model.named_buffers():
        if name in model.state_dict():
            tensors[name] = buffer.detach().to("cpu", copy=True)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, state_dict=tensors)
    _declare_dtype(folder / "config.json", dtype)
    copy_tokenizer(tokenizer_from, folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies whatever tokenizer files `source` has."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _declare_dtype(config: Path, dtype: torch.dtype) -> None:
    """The config names the dtype of the file, not the one that the optimizer keeps."""
    settings = json.loads(config.read_text())
    settings["dtype"] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
