"""A model with its optimizer in a DeepSpeed engine: backward, step, and its complete state.

ZeRO stage 0 keeps everything on every rank; 1, 2 and 3 shard optimizer state, gradients and
parameters. DeepSpeed averages gradients over ranks; `backward` undoes that, so that callers divide
by global counts only.
"""

import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from capo.learner.ranks import Ranks

Model = TypeVar("Model", bound=nn.Module)
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_GATHER_ELEMENTS = 1 << 26  # parameters that are gathered at once for export


class TrainEngine(Generic[Model]):
    """Owns `model` and its AdamW. Ranks call every method together, in the same order."""

    def __init__(
        self,
        model: Model,
        ranks: Ranks,
        *,
        zero_stage: int = 0,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
    ) -> None:
        """`max_grad_norm` 0 clips nothing. The learning rate is given to every step."""
        self.model = model
        self.ranks = ranks
        self.zero_stage = zero_stage
        self._max_grad_norm = max_grad_norm
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            parameters, lr=0.0, betas=(0.9, 0.999), weight_decay=weight_decay, fused=True
        )
        self._engine = _initialize(
            model,
            self._optimizer,
            {
                "zero_optimization": {
                    "stage": zero_stage,
                    "reduce_bucket_size": _bucket(parameters),
                },
                # Stage 0 clips here, because DeepSpeed would not report the norm there.
                "gradient_clipping": max_grad_norm if zero_stage else 0.0,
            },
        )
        if ranks.world_size == 1 and zero_stage == 0:
            self._engine.enable_backward_allreduce = False

    def forward(self, *inputs: Any) -> Any:
        """The model's output for a pass that `backward` follows; else call `model` itself."""
        return self._engine(*inputs)

    def backward(self, loss_sum: Tensor, divisor: float, *, last: bool) -> None:
        """Accumulates the gradient of `loss_sum / divisor`; `last` of the step's microbatches."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss_sum * (self.ranks.world_size / divisor), scale_wrt_gas=False)

    def step(self, learning_rate: float) -> float:
        """One optimizer step; returns the gradient's global norm before clipping.

        A gradient that is not finite changes nothing: its step is skipped on all ranks.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        if self.zero_stage == 0:
            limit = self._max_grad_norm or float("inf")
            norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), limit))
            if math.isfinite(norm):
                self._engine.step()
            else:
                self._engine.zero_grad()
            return norm
        self._engine.step()
        return float(self._engine.get_global_grad_norm())

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full parameters by their names in the model; sharded ones are gathered layer by layer."""
        return gathered(self.model)

    def state(self) -> dict[str, Tensor]:
        """This rank's master weights and optimizer moments, as they are (no copies)."""
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters().items():
            tensors[f"master.{name}"] = master.detach()
            for moment in _MOMENTS:
                if moment in self._optimizer.state.get(master, {}):
                    tensors[f"{moment}.{name}"] = self._optimizer.state[master][moment]
        return tensors

    def check_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ValueError if `tensors` are not of a model of these shapes."""
        shapes = {name: tuple(master.shape) for name, master in self._masters().items()}
        given = {
            name.removeprefix("master."): tuple(tensor.shape)
            for name, tensor in tensors.items()
            if name.startswith("master.")
        }
        if shapes != given:
            differing = sorted(set(shapes.items()) ^ set(given.items()))[0][0]
            raise ValueError(
                f"the saved optimizer state does not fit this model and number of ranks: "
                f"{differing} is {given.get(differing)} there and {shapes.get(differing)} here"
            )

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores what `state` gave, on the same rank of the same number of ranks.

        Raises ValueError as `check_state` does, before anything has changed.
        """
        self.check_state(tensors)
        masters = self._masters()
        self._optimizer.state.clear()
        for name, master in masters.items():
            with torch.no_grad():
                master.copy_(tensors[f"master.{name}"])
            moments = {moment: tensors.get(f"{moment}.{name}") for moment in _MOMENTS}
            self._optimizer.state[master].update(
                {
                    moment: tensor.to(master.device, copy=True)
                    for moment, tensor in moments.items()
                    if tensor is not None
                }
            )
        self._publish_masters()

    def _masters(self) -> dict[str, Tensor]:
        """What the optimizer steps: parameters, or this rank's flat partitions of them."""
        if self.zero_stage == 0:
            return {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        zero = self._engine.optimizer
        partitions = (
            zero.fp32_partitioned_groups_flat
            if self.zero_stage == 3
            else zero.single_partition_of_fp32_groups
        )
        return {f"partition{index}": tensor for index, tensor in enumerate(partitions)}

    def _publish_masters(self) -> None:
        """Puts the masters' values into the model's parameters on all ranks."""
        zero = self._engine.optimizer
        if self.zero_stage in (1, 2):
            zero.update_lp_params()
        elif self.zero_stage == 3:
            for index in range(len(zero.fp32_partitioned_groups_flat)):
                zero._reassign_or_swap_out_partitioned_parameters(index)
            if zero.persistent_parameters:
                # Not gathered: the first pass, which DeepSpeed learns its order of fetches from,
                # shall meet them as it would have in an engine that loaded nothing.
                zero.persistent_parameters[0].partition(zero.persistent_parameters)


def shard_frozen(model: nn.Module, zero_stage: int) -> None:
    """Lets ZeRO-3 shard a model that is only read; other stages keep it whole on every rank."""
    if zero_stage == 3:
        _initialize(model, None, {"zero_optimization": {"stage": 3}})


def num_parameters(model: nn.Module) -> int:
    """Elements of all parameters, shared ones once, also of those that lie on other ranks."""
    return sum(_num_elements(parameter) for parameter in model.parameters())


def gathered(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of every parameter, shared ones once; valid until the next is taken."""
    bucket: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in model.named_parameters():
        bucket.append((name, parameter))
        size += _num_elements(parameter)
        if size >= _GATHER_ELEMENTS:
            yield from _gather(bucket)
            bucket, size = [], 0
    yield from _gather(bucket)


def _num_elements(parameter: nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _gather(bucket: list[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
    sharded = [parameter for _, parameter in bucket if hasattr(parameter, "ds_id")]
    context: AbstractContextManager[Any] = nullcontext()
    if sharded:
        import deepspeed

        context = deepspeed.zero.GatheredParameters(sharded)
    with context:
        for name, parameter in bucket:
            yield name, parameter.detach()


def _bucket(parameters: list[nn.Parameter]) -> int:
    """DeepSpeed allocates its communication buffers at this size, so not larger than the model."""
    return min(500_000_000, sum(parameter.numel() for parameter in parameters))


def _initialize(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: dict[str, Any]
) -> Any:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import deepspeed.ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    if not torch.cuda.is_available():
        # Otherwise DeepSpeed runs a compiler, to see which of its extensions it could build, and
        # then builds one for shared-memory collectives. gloo and torch's AdamW need none.
        deepspeed.ops.__compatible_ops__ = dict.fromkeys(ALL_OPS, False)
    warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+_tensor", module="torch")
    defaults = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # the boundary is set by hand
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=defaults | config)
    return engine
