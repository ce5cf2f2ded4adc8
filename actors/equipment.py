"""What an actor plays with, made from the setup that its learner sent."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
from msgspec import Struct

from capo.actors.counts import Counts
from capo.actors.engine import Engine
from capo.actors.player import Player, make_player
from capo.actors.weight_duty import WeightDuty
from capo.configs.schema import RolloutConfig
from capo.protocol.client import ActorClient
from capo.protocol.messages import ActorSetup, WeightsReport


class StartEngine(Protocol):
    def __call__(self, setup: ActorSetup, rollout: RolloutConfig) -> Awaitable[Engine]: ...


class Equipment(Struct, frozen=True, kw_only=True):
    """`concurrency`: episodes at once, as the run's configuration says."""

    engine: Engine
    player: Player
    duty: WeightDuty
    concurrency: int
    tokenizer_digest: str


async def equip(
    setup: ActorSetup,
    start_engine: StartEngine,
    client: ActorClient,
    counts: Counts,
    tasks: asyncio.TaskGroup,
    on_weights: Callable[[WeightsReport], None],
) -> Equipment:
    """Takes as long as the engine takes to start; raises a CapoError for a setup that is unfit."""
    config = msgspec.json.decode(setup.rollout, type=RolloutConfig)
    player = await make_player(setup, config, client, counts)
    engine = await start_engine(setup, config)
    return Equipment(
        engine=engine,
        player=player,
        duty=WeightDuty(engine, client.send, on_weights, tasks),
        concurrency=config.concurrency,
        tokenizer_digest=setup.tokenizer_digest,
    )
