"""Real tokens per second of packed, padded and one-by-one training, in one run on this machine.

    python benchmarks/packing.py [--sequences 24] [--hidden 128] [--layers 4] [--repeats 3]

One forward and backward over the same sequences, four ways: padded to the longest (what most
training loops do), packed under one block mask, packed with attention per segment (what capo
does), and one sequence after the other. All train the same tokens; the script checks that their
losses agree before it prints how they compare. Everything runs on one thread.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from capo.learner.microbatch import PlacedSegment, collate
from capo.learner.model import PolicyModel, Precision, load_policy
from capo.learner.segments import ActionSpan, Segment

VOCABULARY = 1024


def sequences(count: int, seed: int = 0) -> list[Segment]:
    """Lengths as agents produce them: many short, some long. Half of every sequence is sampled."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(5.6, 0.7, count), 32, 2048).astype(int)
    return [
        Segment(
            rng.integers(0, VOCABULARY, length).astype(np.int32),
            (ActionSpan(0, length // 2, length),),
        )
        for length in lengths
    ]


def build(folder: Path, hidden: int, layers: int) -> None:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(2, hidden // 32),
        num_key_value_heads=max(1, hidden // 64),
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def packed(model: PolicyModel, segments: list[Segment]) -> Tensor:
    placed = [PlacedSegment(one, 0, 0) for one in segments]
    return model(collate(placed, torch.device("cpu")), 1.0)[0].sum()


def padded(model: PreTrainedModel, segments: list[Segment]) -> Tensor:
    longest = max(len(one.token_ids) for one in segments)
    ids = torch.zeros(len(segments), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(segments):
        ids[row, : len(one.token_ids)] = torch.from_numpy(one.token_ids)
        mask[row, : len(one.token_ids)] = 1
    hidden = model.base_model(ids, attention_mask=mask, use_cache=False).last_hidden_state
    starts = [row * longest for row in range(len(segments))]
    return _trained_logprobs(model, hidden.flatten(0, 1), ids.flatten(), segments, starts)


def block_masked(model: PreTrainedModel, segments: list[Segment]) -> Tensor:
    ids = torch.from_numpy(np.concatenate([one.token_ids for one in segments])).long()[None]
    lengths = torch.tensor([len(one.token_ids) for one in segments])
    owner = torch.repeat_interleave(torch.arange(len(segments)), lengths)
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])[None]
    allowed = (owner[:, None] == owner[None]).tril()[None, None]
    output = model.base_model(ids, attention_mask=allowed, position_ids=positions, use_cache=False)
    starts = (lengths.cumsum(0) - lengths).tolist()
    return _trained_logprobs(model, output.last_hidden_state[0], ids[0], segments, starts)


def measure(name: str, run: Callable[[], Tensor], tokens: int, repeats: int) -> tuple[float, float]:
    """(summed log-probs, real tokens per second of the fastest repeat)."""
    seconds, total = [], 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        loss = run()
        if loss.requires_grad:
            loss.backward()
        seconds.append(time.perf_counter() - start)
        total = loss.item()
    rate = tokens / min(seconds)
    print(f"{name:<32} {rate:8.0f} tokens/s", flush=True)
    return total, rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    segments = sequences(arguments.sequences)
    tokens = sum(len(one.token_ids) for one in segments)
    longest = max(len(one.token_ids) for one in segments)
    print(
        f"{len(segments)} sequences, {tokens} tokens, longest {longest}; "
        f"padding would add {len(segments) * longest / tokens - 1:.0%}"
    )
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), arguments.hidden, arguments.layers)
        ours = load_policy(Path(folder), Precision(), torch.device("cpu"))
        plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")

    def one_by_one() -> Tensor:
        """Backward after every sequence, as a loop over sequences would."""
        total = torch.zeros(())
        for one in segments:
            loss = packed(ours, [one])
            loss.backward()
            total += loss.detach()
        return total

    ways = {
        "padded to the longest": lambda: padded(plain, segments),
        "packed, one block mask": lambda: block_masked(plain, segments),
        "one by one": one_by_one,
        "packed, attention per segment": lambda: packed(ours, segments),
    }
    results = {name: measure(name, run, tokens, arguments.repeats) for name, run in ways.items()}
    total, rate = results["packed, attention per segment"]
    for name, (other_total, other_rate) in results.items():
        if not np.isclose(total, other_total, rtol=1e-4):
            raise SystemExit(f"{name} gave {other_total}, not {total}: not the same computation")
        if other_rate != rate:
            print(f"packed, attention per segment = {rate / other_rate:5.2f} x {name}")


def _trained_logprobs(
    model: PreTrainedModel, hidden: Tensor, ids: Tensor, segments: list[Segment], starts: list[int]
) -> Tensor:
    """The head on trained tokens only, as capo does: what differs is the packing alone."""
    spans = [one.actions[0] for one in segments]
    labels = torch.cat(
        [
            torch.arange(start + span.start, start + span.end)
            for start, span in zip(starts, spans, strict=True)
        ]
    )
    logits = model.get_output_embeddings()(hidden[labels - 1])
    return -F.cross_entropy(logits, ids[labels], reduction="sum")


if __name__ == "__main__":
    main()
