"""One of several ranks, as its own process: updates, saves, loads, and writes down what it got.

python rank_process.py RANK WORLD_SIZE FOLDER ZERO_STAGE
"""

import errno
import logging
import sys
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist

from capo.configs.schema import RunConfig
from capo.learner import model
from capo.learner.engines import gathered
from capo.learner.model import Precision
from capo.learner.ranks import join
from capo.learner.results import compare, encode
from capo.learner.trainer import Trainer
from capo.learner.update import Models, run_update
from capo.protocol.errors import CheckpointError
from tests.factories import VOCABULARY, batch_of_episodes, run_config
from tests.learner.exact import exact_models

EPISODES = batch_of_episodes(7, seed=1)


def config(zero_stage: int):
    return run_config(
        minibatches=2,
        token_budget=40,
        zero_stage=zero_stage,
        policy_lr=1e-3,
        max_grad_norm=0.5,
        gradient_checkpointing=zero_stage == 3,
    )


def float32_models(policy: Path, settings: RunConfig) -> Models:
    """DeepSpeed reduces no float64 gradients."""
    return exact_models(policy, settings, join(), reference=policy, precision=Precision())


def main(rank: int, world_size: int, folder: Path, zero_stage: int) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    if zero_stage == 3:
        # Ranks score in different numbers of parts, and must not wait for each other over it.
        model.MAX_LOGITS = 4 * VOCABULARY
    store = f"file://{folder}/store-{zero_stage}-{world_size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    ranks = join()
    assert (ranks.rank, ranks.world_size) == (rank, world_size)
    models = float32_models(folder / "policy", config(zero_stage))
    result = run_update(EPISODES, 0, models, config(zero_stage), ranks)
    (folder / f"result-{zero_stage}-{rank}").write_bytes(encode(result))

    trainer = Trainer(config(zero_stage), folder / "policy")
    trainer.update(EPISODES, 0)
    checkpoint = folder / f"checkpoint-{zero_stage}"
    trainer.save(checkpoint)
    went_on = trainer.update(EPISODES, 1)
    resumed = Trainer(config(zero_stage), folder / "policy")
    resumed.load(checkpoint)
    differences = compare(went_on, resumed.update(EPISODES, 1))
    assert differences == [], differences
    assert_fails_together(trainer, folder / f"blocked-{zero_stage}", world_size)
    assert_goes_on_after_a_load(folder / "untied", config(zero_stage), checkpoint / "untied")
    names = [name for name, _ in gathered(models.policy.model.causal_lm)]
    assert names == [name for name, _ in trainer.weights()]
    dist.destroy_process_group()


def assert_fails_together(trainer: Trainer, folder: Path, world_size: int) -> None:
    """What one rank cannot write or read fails on all of them, and they go on together."""
    last = folder / "optimizer" / f"policy-rank-{world_size - 1}-of-{world_size}.safetensors"
    last.mkdir(parents=True, exist_ok=True)
    with pytest.raises(OSError, match="Is a directory") as caught:
        trainer.save(folder)
    assert caught.value.errno == errno.EISDIR
    with pytest.raises(CheckpointError):
        trainer.load(folder)


def assert_goes_on_after_a_load(policy: Path, settings: RunConfig, folder: Path) -> None:
    """ZeRO-3 learns in which order parameters are fetched, the head's from outside of the head;
    what was loaded, or gathered to be saved, must not change that order."""
    Trainer(settings, policy).save(folder)
    trainer = Trainer(settings, policy)
    trainer.load(folder)
    for version in range(4):
        trainer.update(EPISODES, version)
        if version % 2:
            trainer.save(folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
