"""A small Qwen3 and a tokenizer of a closed world's own words: a policy that two CPU cores train.

Both are written in Hugging Face's format, so that transformers and vLLM load them like any other
model. Every word the world knows is one token, with and without the space before it; every other
text falls apart into bytes, so that decoding always gives back the text that was encoded.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from capo.configs.schema import TinyModelConfig

PAD, MESSAGE_START, MESSAGE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant", "tool")
PIECES = rf"(?:{'|'.join(ROLES)})\n| ?\w+| ?[^\w\s]|\s"
# ChatML without the newline between two messages: a token less per message.
CHAT_TEMPLATE = """\
{%- if tools %}{{ raise_exception('the tiny model has no template for tools') }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def build_tokenizer(words: Sequence[str], folder: Path) -> PreTrainedTokenizerBase:
    """Writes the tokenizer of `words` to `folder` and returns it as loaded from there."""
    byte_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = [f"{role}\n" for role in ROLES]
    for word in sorted(set(words)):
        if not re.fullmatch(r"\w+|[^\w\s]", word):
            raise ValueError(f"{word!r} is not a single word or punctuation mark")
        pieces += [word, f" {word}"]
    tokens = [PAD, MESSAGE_START, MESSAGE_END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += ["".join(part for part, _ in byte_of.pre_tokenize_str(piece)) for piece in pieces]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}

    # ignore_merges: a piece that is in the vocabulary is one token, any other goes to bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PIECES), behavior="isolated"), byte_of]
    )
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=MESSAGE_END,
        additional_special_tokens=[MESSAGE_START],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def build_policy(
    config: TinyModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    seed: int,
    folder: Path,
) -> None:
    """Writes a randomly initialised policy and the tokenizer to `folder`, in float32."""
    model_config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,  # tied, it learned to name things several times more slowly
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(model_config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
