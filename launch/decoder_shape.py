"""How large a decoder is, by its config.json alone: parameters, and values in the KV cache.

Counted as Llama, Qwen and most others are built; biases and norms of heads are too small to count.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from capo.configs.schema import TinyModelConfig
from capo.protocol.errors import ConfigError

_TINY_VOCABULARY = 350  # bytes, and a small world's words with and without a space, about

Positive = Annotated[int, Meta(gt=0)]


class DecoderShape(Struct, frozen=True, kw_only=True):
    """The keys of config.json that decide it; None where others imply one."""

    hidden_size: Positive
    num_hidden_layers: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    intermediate_size: Positive
    vocab_size: Positive
    tie_word_embeddings: bool = False

    @property
    def num_parameters(self) -> int:
        hidden = self.hidden_size
        queries = self.num_attention_heads * self._head_dim
        attention = hidden * (queries + self._kv_width) + queries * hidden
        layer = attention + 3 * hidden * self.intermediate_size + 2 * hidden
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return self.num_hidden_layers * layer + embeddings + hidden

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return self.num_hidden_layers * self._kv_width

    @property
    def _head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def _kv_width(self) -> int:
        return 2 * (self.num_key_value_heads or self.num_attention_heads) * self._head_dim


def read_shape(folder: Path) -> DecoderShape | None:
    """None where there is no config.json. Raises ConfigError if it is not that of a decoder."""
    file = folder / "config.json"
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=DecoderShape)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file} is not a decoder's config.json: {error}.") from error


def tiny_shape(tiny: TinyModelConfig) -> DecoderShape:
    return DecoderShape(
        hidden_size=tiny.hidden_size,
        num_hidden_layers=tiny.num_layers,
        num_attention_heads=tiny.num_heads,
        num_key_value_heads=tiny.num_kv_heads,
        head_dim=tiny.head_dim,
        intermediate_size=tiny.intermediate_size,
        vocab_size=_TINY_VOCABULARY,
    )
