"""Attention over packed segments, behind the call that flash attention takes. T tokens, S segments.

On CUDA, in half precision, `flash_attention_2` reads `cu_seq_lens_q` natively. Elsewhere
`capo_varlen`, registered with transformers under that name, takes the same arguments and runs one
scaled-dot-product attention per segment, so nothing is padded and no [T, T] mask exists.
Deliberately no mask function is registered: transformers then builds none.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.utils import is_flash_attn_2_available

VARLEN = "capo_varlen"


def varlen_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, head size]
    key: Tensor,  # [1, key-value heads, T, head size]
    value: Tensor,  # [1, key-value heads, T, head size]
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,  # int32 [S + 1]
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside every segment; transformers' attention signature.

    Raises ValueError for what it does not do: a mask, dropout, or a sliding window that is
    shorter than a segment.
    """
    if attention_mask is not None or dropout:
        raise ValueError(f"{VARLEN} attention takes no attention mask and no dropout")
    bounds = cu_seq_lens_q.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    if sliding_window is not None and max(lengths) > sliding_window:
        raise ValueError(
            f"a segment of {max(lengths)} tokens is longer than the model's sliding window of "
            f"{sliding_window}, which {VARLEN} attention does not support; lower model.max_length"
        )
    # Repeated beforehand: the same numbers as the kernel's own grouping, and faster backward.
    repeats = query.shape[1] // key.shape[1]
    key, value = _repeat_heads(key, repeats), _repeat_heads(value, repeats)
    outputs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        for q, k, v in zip(
            torch.split(query, lengths, dim=2),
            torch.split(key, lengths, dim=2),
            torch.split(value, lengths, dim=2),
            strict=True,
        )
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None  # [1, T, heads, head size]


def _repeat_heads(states: Tensor, repeats: int) -> Tensor:
    """[1, key-value heads, T, head size] -> [1, heads, T, head size], each head `repeats` times."""
    if repeats == 1:
        return states
    return states[:, :, None].expand(-1, -1, repeats, -1, -1).flatten(1, 2)


AttentionInterface.register(VARLEN, varlen_attention)


def implementation(device: torch.device, dtype: torch.dtype) -> str:
    """The name of the attention to load a model with that computes on `device` in `dtype`."""
    half = dtype in (torch.bfloat16, torch.float16)
    if device.type == "cuda" and half and is_flash_attn_2_available():
        return "flash_attention_2"
    return VARLEN


def packed_arguments(cu_seqlens: Tensor, max_length: int) -> dict[str, Tensor | int]:
    """The keyword arguments that tell either implementation where segments begin and end."""
    return {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": max_length,
        "max_length_k": max_length,
    }
