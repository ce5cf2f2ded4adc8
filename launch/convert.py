"""`capo convert GGUF FOLDER`: a GGUF file to a Hugging Face folder in bfloat16 safetensors."""

import argparse
from pathlib import Path

from capo.protocol.errors import ConfigError


def command(args: argparse.Namespace) -> int:
    source, target = Path(args.gguf), Path(args.folder)
    if not source.is_file():
        raise ConfigError(f"there is no file {source}.")
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty; choose another folder or remove it.")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = str(source.parent), source.name
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"{source} cannot be read as a GGUF model: {error}") from error
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{target}: {parameters / 1e6:.0f}M parameters, {model.config.model_type}")
    return 0
