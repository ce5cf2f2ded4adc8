"""The learner's compute as one object: policy, critic and reference, and their life on disk.

A saved trainer is complete: loading it and updating gives the same bits as never having stopped.
Nothing is pickled; weights, moments and settings are safetensors and JSON.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from capo.configs.algorithms import needs_critic, needs_reference
from capo.configs.schema import RunConfig
from capo.learner.determinism import make_deterministic
from capo.learner.engines import Model, TrainEngine, gathered, num_parameters, shard_frozen
from capo.learner.episodes import Episode
from capo.learner.hf_checkpoint import export
from capo.learner.microbatch import PlacedSegment, collate
from capo.learner.model import CriticModel, PolicyModel, Precision, freeze, load_critic, load_policy
from capo.learner.ranks import join
from capo.learner.results import UpdateResult
from capo.learner.segments import ActionSpan, Segment
from capo.learner.together import load_together, write_together
from capo.learner.trainer_state import (
    TrainerState,
    optimizer_file,
    read_optimizer,
    read_state,
    weights_digest,
    write_state,
)
from capo.learner.update import Models, run_update
from capo.protocol.errors import CheckpointError
from capo.protocol.records import IntArray


class Trainer:
    """One per rank; ranks call every method together. Learning rates follow from `version`."""

    def __init__(
        self,
        config: RunConfig,
        policy_dir: Path,
        *,
        parameter_dtype: torch.dtype = torch.float32,
    ) -> None:
        """`policy_dir`: the Hugging Face folder where the policy starts and the reference stays.

        The optimizer keeps weights in `parameter_dtype`; computation and exports are in the
        config's `model.dtype`.

        Raises ConfigError, OSError or ValueError for a model that cannot be used: on all ranks if
        one of them could not load it.
        """
        make_deterministic(config.seed)
        self.version = 0
        self._config = config
        self._policy_dir = policy_dir
        self._ranks = join()
        self._dtype = getattr(torch, config.model.dtype)
        exact = config.model.dtype == "float32"
        self._precision = Precision(parameter_dtype, parameter_dtype if exact else self._dtype)
        self._models = Models(
            policy=self._engine(self._load_policy(trained=True)),
            critic=self._engine(self._load_critic()) if needs_critic(config.algorithm) else None,
            reference=self._load_reference() if needs_reference(config.algorithm) else None,
        )

    def update(self, episodes: Sequence[Episode], version: int) -> UpdateResult:
        """Trains on one batch, from `version` to the next. Every rank is given the same batch.

        Raises ValueError if `version` is not the trainer's, or for episodes that are no training
        data; nothing has changed then.
        """
        if version != self.version:
            raise ValueError(f"update of version {version}, but the weights are {self.version}")
        result = run_update(episodes, version, self._models, self._config, self._ranks)
        self.version = version + 1
        return result

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's full tensors under their Hugging Face names, in `model.dtype`, tied ones
        once. A tensor is valid until the next is taken."""
        for name, tensor in gathered(self._models.policy.model.causal_lm):
            yield name, tensor.to(self._dtype)

    @property
    def vocabulary_size(self) -> int:
        return int(self._models.policy.model.causal_lm.config.vocab_size)

    @torch.no_grad()
    def logprobs(self, tokens: IntArray | Sequence[int]) -> Tensor:
        """log p(token | those before it) at temperature 1 for all tokens but the first, float [n-1]
        on the CPU."""
        sequence = np.asarray(tokens, dtype=np.int32)
        if len(sequence) < 2:
            raise ValueError(f"log-probs need at least 2 tokens, got {len(sequence)}")
        whole = Segment(sequence, (ActionSpan(0, 1, len(sequence)),))
        microbatch = collate([PlacedSegment(whole, 0, 0)], self._ranks.device)
        logprobs, _ = self._models.policy.model(microbatch, 1.0)
        assert isinstance(logprobs, Tensor)
        return logprobs.cpu()

    def save(self, folder: Path) -> None:
        """Writes everything that `load` needs; `policy/` and `critic/` are Hugging Face folders.

        Raises OSError on all ranks if one of them could not write.
        """
        writes: list[Callable[[], None]] = [partial(folder.mkdir, parents=True, exist_ok=True)]
        writes += [*self._exports(folder), partial(self._save_state, folder)]
        write_together(writes, folder, self._ranks)

    @property
    def checkpoint_bytes(self) -> int:
        """About what `save` writes on all ranks together: the exports, and the optimizer's master
        weights with two moments each."""
        state = 3 * self._precision.parameter.itemsize
        return sum(
            num_parameters(engine.model) * (self._dtype.itemsize + state)
            for _, engine in self._engines()
        )

    def load(self, folder: Path) -> None:
        """Continues from what `save` wrote.

        Raises CheckpointError for a folder that is torn, or that belongs to another run: another
        reference policy, number of ranks, ZeRO stage or set of models.
        """
        failure: CheckpointError | None = None
        try:
            version, tensors = self._read(folder)
        except CheckpointError as error:
            failure = error
        failed = self._ranks.largest(int(failure is not None))
        if failure:
            raise failure
        if failed:
            raise CheckpointError(f"another rank could not load the checkpoint {folder}")
        for name, engine in self._engines():
            engine.load_state(tensors[name])
        self.version = version

    def export(self, folder: Path) -> None:
        """Only the Hugging Face folders `policy/` and, if there is one, `critic/`."""
        for write in self._exports(folder):
            write()

    def _exports(self, folder: Path) -> Iterator[Callable[[], None]]:
        """Every rank has to make all these calls, since each gathers what ranks share."""
        models: dict[str, PreTrainedModel] = {"policy": self._models.policy.model.causal_lm}
        if self._models.critic is not None:
            models["critic"] = self._models.critic.model.classifier
        for name, model in models.items():
            yield partial(
                export, model, gathered(model), self._dtype, self._policy_dir, folder / name,
                write=self._ranks.rank == 0,
            )  # fmt: skip

    def _save_state(self, folder: Path) -> None:
        """What this rank alone has: its part of the optimizers."""
        for name, engine in self._engines():
            path = optimizer_file(folder, name, self._ranks)
            path.parent.mkdir(exist_ok=True)
            tensors = {key: value.cpu().contiguous() for key, value in engine.state().items()}
            save_file(tensors, path)
        if self._ranks.rank == 0:
            write_state(folder, self._state())

    def _state(self) -> TrainerState:
        return TrainerState(
            version=self.version,
            zero_stage=self._config.learner.zero_stage,
            world_size=self._ranks.world_size,
            has_critic=self._models.critic is not None,
            reference_digest=self._reference_digest,
        )

    @cached_property
    def _reference_digest(self) -> str:
        return weights_digest(self._policy_dir)

    def _load_policy(self, *, trained: bool) -> PolicyModel:
        load = partial(
            load_policy,
            self._policy_dir,
            self._precision,
            self._ranks.device,
            checkpoint_layers=trained and self._config.learner.gradient_checkpointing,
        )
        return load_together(load, self._policy_dir, self._ranks)

    def _load_critic(self) -> CriticModel:
        path = self._config.model.critic_path
        folder = Path(path) if path else self._policy_dir
        load = partial(
            load_critic,
            folder,
            self._precision,
            self._ranks.device,
            checkpoint_layers=self._config.learner.gradient_checkpointing,
        )
        return load_together(load, folder, self._ranks)

    def _load_reference(self) -> PolicyModel:
        reference = freeze(self._load_policy(trained=False))
        shard_frozen(reference, self._config.learner.zero_stage)
        return reference

    def _engine(self, model: Model) -> TrainEngine[Model]:
        learner = self._config.learner
        return TrainEngine(
            model,
            self._ranks,
            zero_stage=learner.zero_stage,
            weight_decay=learner.weight_decay,
            max_grad_norm=learner.max_grad_norm,
        )

    def _engines(
        self,
    ) -> Iterator[tuple[str, TrainEngine[PolicyModel] | TrainEngine[CriticModel]]]:
        yield "policy", self._models.policy
        if self._models.critic is not None:
            yield "critic", self._models.critic

    def _read(self, folder: Path) -> tuple[int, dict[str, dict[str, Tensor]]]:
        """The version of a checkpoint, and the tensors of this rank by the engine they are of."""
        version = read_state(folder, self._state()).version
        tensors = {name: read_optimizer(folder, name, self._ranks) for name, _ in self._engines()}
        for name, engine in self._engines():
            try:
                engine.check_state(tensors[name])
            except ValueError as error:
                raise CheckpointError(
                    f"the checkpoint {folder} cannot be loaded: {error}"
                ) from error
        return version, tensors
