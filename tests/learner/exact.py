"""A learner in float64 throughout, so that tests can tell a wrong number from a rounded one."""

from pathlib import Path

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from capo.configs.algorithms import needs_critic, needs_reference
from capo.configs.schema import RunConfig
from capo.learner.engines import TrainEngine, shard_frozen
from capo.learner.model import Precision, freeze, load_critic, load_policy
from capo.learner.ranks import Ranks
from capo.learner.update import Models

FLOAT64 = Precision(torch.float64, torch.float64)


def exact_models(
    folder: Path,
    config: RunConfig,
    ranks: Ranks,
    *,
    reference: Path,
    precision: Precision = FLOAT64,
) -> Models:
    """Policy and critic from `folder`, the critic with a random head so that values differ."""
    policy = exact_norms(load_policy(folder, precision, ranks.device))
    critic = None
    if needs_critic(config.algorithm):
        critic = exact_norms(load_critic(folder, precision, ranks.device))
        nn.init.normal_(critic.classifier.score.weight, generator=torch.Generator().manual_seed(5))
    frozen = None
    if needs_reference(config.algorithm):
        frozen = freeze(exact_norms(load_policy(reference, precision, ranks.device)))
        shard_frozen(frozen, config.learner.zero_stage)
    settings = {
        "zero_stage": config.learner.zero_stage,
        "max_grad_norm": config.learner.max_grad_norm,
    }
    return Models(
        policy=TrainEngine(policy, ranks, **settings),
        critic=None if critic is None else TrainEngine(critic, ranks, **settings),
        reference=frozen,
    )


def exact_norms(model: nn.Module) -> nn.Module:
    """transformers' RMSNorm computes in float32 whatever its weights are; torch's does not."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Qwen3RMSNorm):
                norm = nn.RMSNorm(child.weight.shape[0], child.variance_epsilon)
                norm.weight = child.weight
                setattr(parent, name, norm)
    return model


def gradients(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Of the only step taken so far: AdamW's first moment after it is a tenth of the gradient."""
    prefix = "exp_avg."
    return {
        name.removeprefix(prefix): tensor * 10
        for name, tensor in engine.state().items()
        if name.startswith(prefix)
    }
