"""Policy and critic: Hugging Face modules that read packed segments and give only what trains.

T tokens, n trained tokens, V vocabulary, H hidden size. All computation happens inside `forward`,
so that a DeepSpeed engine can wrap the module whatever it shards. Parameters are kept in
`parameter_dtype` (the optimizer's master weights); with another `compute_dtype`, matrix products
run in that one under autocast.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from msgspec import Struct
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from capo.learner.attention import implementation, packed_arguments
from capo.learner.microbatch import Microbatch
from capo.protocol.errors import ConfigError

MAX_LOGITS = 1 << 26  # elements of [rows, V] that exist at once; more are recomputed backward

# Models whose forward changes the head's output would get other log-probs here than elsewhere.
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class Precision(Struct, frozen=True):
    """In which dtype weights are kept, and in which matrix products run."""

    parameter: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32


class PolicyModel(nn.Module):
    """A causal language model that scores given tokens."""

    def __init__(self, causal_lm: PreTrainedModel, precision: Precision) -> None:
        super().__init__()
        self.causal_lm = _without_dropout(causal_lm)
        self.precision = precision
        for name in _LOGIT_TRANSFORMS:
            value = getattr(causal_lm.config, name, None)
            if value is not None and value != 1.0:
                raise ConfigError(
                    f"{causal_lm.config.model_type} models change their logits by {name}={value}, "
                    "which the learner does not reproduce: use another model."
                )

    @property
    def head(self) -> nn.Linear:
        head = self.causal_lm.get_output_embeddings()
        assert isinstance(head, nn.Linear)
        return head

    def forward(
        self, microbatch: Microbatch, temperature: float, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """[n] log-probs of trained tokens under softmax(logits / temperature), at least float32.

        Second comes the entropy of the same distributions [n], without gradient, if asked for.
        """
        with _autocast(microbatch.token_ids.device, self.precision):
            hidden = _last_hidden(self.causal_lm, microbatch)  # [T, H]
            hidden = hidden[microbatch.predictors]  # [n, H]
            weight, bias = self.head.weight, self.head.bias
            rows = max(1, MAX_LOGITS // weight.shape[0])
            if len(hidden) <= rows:
                return _score(hidden, weight, bias, microbatch.labels, temperature, with_entropy)
            parts = [
                checkpoint(
                    _score, part, weight, bias, labels, temperature, with_entropy,
                    use_reentrant=False, preserve_rng_state=False,
                )
                for part, labels in zip(
                    torch.split(hidden, rows), torch.split(microbatch.labels, rows), strict=True
                )
            ]  # fmt: skip
        logprobs = torch.cat([logprobs for logprobs, _ in parts])
        return logprobs, torch.cat([entropy for _, entropy in parts]) if with_entropy else None


class CriticModel(nn.Module):
    """A token classifier with one label: the value of having read a sequence up to a token."""

    def __init__(self, classifier: PreTrainedModel, precision: Precision) -> None:
        super().__init__()
        self.classifier = _without_dropout(classifier)
        self.precision = precision

    def forward(self, microbatch: Microbatch, positions: Tensor) -> Tensor:
        """Values at `positions` [m] of the packed row, at least float32 [m]."""
        with _autocast(microbatch.token_ids.device, self.precision):
            hidden = _last_hidden(self.classifier, microbatch)
        values: Tensor = self.classifier.score(_at_least_float32(hidden[positions]))
        return values.squeeze(-1)


def load_policy(
    folder: Path,
    precision: Precision,
    device: torch.device,
    *,
    checkpoint_layers: bool = False,
) -> PolicyModel:
    """The policy in a Hugging Face folder; OSError if its weights are not safetensors, ConfigError
    for a model whose log-probs would not be those of engines."""
    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(
            folder, use_safetensors=True, **_arguments(precision, device)
        )
    if checkpoint_layers:
        _checkpoint_layers(model)
    return PolicyModel(model.to(device), precision)


def load_critic(
    folder: Path,
    precision: Precision,
    device: torch.device,
    *,
    checkpoint_layers: bool = False,
) -> CriticModel:
    """The critic in a Hugging Face folder: one saved as such, or any model's backbone.

    A backbone without a value head gets one of zeros, so that every value starts at 0.
    """
    arguments = _arguments(precision, device)
    with _quiet():
        architectures = AutoConfig.from_pretrained(folder).architectures or []
        model = AutoModelForTokenClassification.from_pretrained(
            folder, num_labels=1, use_safetensors=True, **arguments
        )
    if not any(name.endswith("ForTokenClassification") for name in architectures):
        nn.init.zeros_(model.score.weight)
        nn.init.zeros_(model.score.bias)
    if checkpoint_layers:
        _checkpoint_layers(model)
    return CriticModel(model.to(device), precision)


def freeze(model: PolicyModel) -> PolicyModel:
    """Turns a policy into a reference, which takes no gradient."""
    return model.requires_grad_(False)


def _score(
    hidden: Tensor,  # [n, H]
    weight: Tensor,  # [V, H]
    bias: Tensor | None,
    labels: Tensor,  # [n]
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    logits = _at_least_float32(F.linear(hidden, weight, bias)) / temperature  # [n, V]
    logprobs = -F.cross_entropy(logits, labels, reduction="none")  # [n]
    if not with_entropy:
        return logprobs, None
    with torch.no_grad():
        everything = logits.log_softmax(-1)
        return logprobs, -(everything.exp() * everything).sum(-1)


def _last_hidden(model: PreTrainedModel, microbatch: Microbatch) -> Tensor:
    """[T, H]"""
    output = model.base_model(
        input_ids=microbatch.token_ids[None],
        position_ids=microbatch.position_ids[None],
        use_cache=False,
        **packed_arguments(microbatch.cu_seqlens, microbatch.max_length),
    )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


@contextmanager
def _quiet() -> Iterator[None]:
    """Without progress bars and without the report that a backbone has no value head."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _arguments(precision: Precision, device: torch.device) -> dict[str, Any]:
    return {
        "dtype": precision.parameter,
        "attn_implementation": implementation(device, precision.compute),
    }


def _autocast(device: torch.device, precision: Precision) -> torch.autocast:
    return torch.autocast(
        device.type, precision.compute, enabled=precision.compute != precision.parameter
    )


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _checkpoint_layers(model: PreTrainedModel) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """In training mode (gradient checkpointing asks for it) but without any random draw."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0
    return model.train()
