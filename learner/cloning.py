"""Behaviour cloning: a fixed number of steps on demonstrated tokens, before any reinforcement.

The same packed forward as the updates', with every action token weighted alike. The matrices inside
the layers are trained by Muon, which learns to compare and to copy words in half as many steps as
AdamW did; everything else by AdamW. Knows no environment and no text; a demonstration is a segment
whose action spans are what is learned.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from capo.configs.schema import WarmStartConfig
from capo.learner.microbatch import PlacedSegment, collate
from capo.learner.model import PolicyModel, Precision, load_policy
from capo.learner.seeds import derive_seed
from capo.learner.segments import Segment

MAX_GRAD_NORM = 1.0

Progress = Callable[[int, float], None]  # steps done, mean loss per action token in nats


def clone(
    folder: Path,
    demonstrations: Sequence[Segment],
    config: WarmStartConfig,
    *,
    seed: int,
    output: Path,
    progress: Progress,
) -> None:
    """Trains the policy in `folder` for `config.steps` steps and writes it to `output`.

    The same arguments give the same weights on the same kind of machine. Raises ValueError where
    there is nothing to learn from.
    """
    if not any(demonstration.actions for demonstration in demonstrations):
        raise ValueError(f"none of the {len(demonstrations)} demonstrations has an action")
    device = torch.device("cpu")
    policy = load_policy(folder, Precision(), device)
    optimizers = _optimizers(policy, config)
    batches = epochs(len(demonstrations), config.batch_episodes, derive_seed(seed, "cloning"))
    for step, batch in zip(range(config.steps), batches, strict=False):
        for optimizer, lr in optimizers:
            optimizer.param_groups[0]["lr"] = lr * lr_factor(step, config)
            optimizer.zero_grad()
        microbatch = collate([PlacedSegment(demonstrations[i], 0, 0) for i in batch], device)
        logprobs, _ = policy(microbatch, temperature=1.0)  # [n]
        loss = -logprobs.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
        for optimizer, _ in optimizers:
            optimizer.step()
        progress(step + 1, float(loss.detach()))
    policy.causal_lm.save_pretrained(output)


def _optimizers(
    policy: PolicyModel, config: WarmStartConfig
) -> list[tuple[torch.optim.Optimizer, float]]:
    """Each with its learning rate. Every parameter is in exactly one of them."""
    ends = {id(policy.head.weight), id(policy.causal_lm.get_input_embeddings().weight)}
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for parameter in policy.parameters():
        inner = parameter.ndim == 2 and id(parameter) not in ends
        (matrices if inner else others).append(parameter)
    return [
        (torch.optim.Muon(matrices, weight_decay=0.0), config.matrix_lr),
        (torch.optim.AdamW(others, weight_decay=0.0), config.lr),
    ]


def epochs(count: int, batch: int, seed: int) -> Iterator[list[int]]:
    """Batches of indices without end: every index once, shuffled, then all of them again."""
    generator = np.random.default_rng(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < batch:
            waiting += generator.permutation(count).tolist()
        yield waiting[:batch]
        del waiting[:batch]


def lr_factor(step: int, config: WarmStartConfig) -> float:
    """Linear up over `warmup_steps`, then linear down to `final_lr_factor` at the last step."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - 1 - config.warmup_steps)
    return 1.0 - (1.0 - config.final_lr_factor) * min(1.0, done)
