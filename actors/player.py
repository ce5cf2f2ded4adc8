"""Plays one lease, from taking an environment to telling how it ended.

Knows nothing of who grants leases, or how many are played at once.
"""

import asyncio
import contextlib
import json

from capo.actors.chat import Chat, load_chat
from capo.actors.counts import Counts
from capo.actors.engine import Engine
from capo.actors.env_pool import EnvPool
from capo.actors.foreign import sentence
from capo.actors.rollout import play
from capo.configs.schema import RolloutConfig
from capo.envs.registry import load_factory
from capo.protocol.client import ActorClient
from capo.protocol.errors import EnvError, ProtocolError
from capo.protocol.messages import ActorSetup
from capo.protocol.records import EpisodeEnd, EpisodeStatus, Lease, Step


class Player:
    """One per actor; any number of leases may be played at the same time."""

    def __init__(
        self, chat: Chat, envs: EnvPool, config: RolloutConfig, client: ActorClient, counts: Counts
    ) -> None:
        self._chat = chat
        self._envs = envs
        self._config = config
        self._client = client
        self._counts = counts

    async def play(self, lease: Lease, engine: Engine) -> None:
        """Every record is delivered as it comes; after a cancellation, no more of the lease."""
        num_steps = 0
        env = None
        healthy = False
        try:
            env = await self._envs.take()
            records = play(lease, env, self._chat, engine, self._config)
            async with contextlib.aclosing(records):
                async for record in records:
                    if isinstance(record, Step):
                        await self._client.deliver(steps=[record])
                        num_steps += 1
                        self._counts.tokens += len(record.action)
                    else:
                        await self._client.deliver(ends=[record])
                        healthy = record.status is not EpisodeStatus.ENV_ERROR
                        self._counts.count(record)
        except (EnvError, ProtocolError) as error:  # nothing to play in, or what it said is unfit
            end = EpisodeEnd(
                episode_id=lease.episode_id,
                status=EpisodeStatus.ENV_ERROR,
                num_steps=num_steps,
                error=sentence(error),
            )
            await self._client.deliver(ends=[end])
            self._counts.count(end)
        finally:
            if env is not None and healthy:
                self._envs.give_back(env)
            elif env is not None:
                await self._envs.discard(env)

    async def close(self) -> None:
        await self._envs.close()


async def make_player(
    setup: ActorSetup, config: RolloutConfig, client: ActorClient, counts: Counts
) -> Player:
    """Load the tokenizer and the environment's factory; the event loop stays free meanwhile."""
    chat = await asyncio.to_thread(load_chat, setup)
    options = json.loads(setup.environment_options)
    factory = await asyncio.to_thread(load_factory, setup.environment, options)
    return Player(chat, EnvPool(factory.make, config.env_timeout_s), config, client, counts)
