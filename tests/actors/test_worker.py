"""An actor against a real server over loopback; engine and environment are scripted."""

import asyncio

import msgspec
import pytest

from capo.configs.schema import RolloutConfig
from capo.protocol.errors import CapoError, EngineError, RefusedError
from capo.protocol.messages import (
    ActorHeartbeat,
    ActorSetup,
    Drain,
    Grant,
    GroupAccept,
    GroupFormed,
    GroupInvite,
    Revoke,
)
from capo.protocol.records import EpisodeStatus
from capo.protocol.server import Server
from tests.actors import worker_world
from tests.actors.worker_world import FORM, WORST, Factory, World, lease


@pytest.fixture
def setup(word_tokenizer, tmp_path) -> ActorSetup:
    word_tokenizer.save_pretrained(tmp_path)
    return ActorSetup(
        environment=f"{worker_world.__name__}:make",
        environment_options=b"{}",
        rollout=msgspec.json.encode(RolloutConfig(concurrency=3, max_action_tokens=8)),
        model_config=b"{}",
        model_dtype="float32",
        max_length=128,
        tokenizer_files={path.name: path.read_bytes() for path in tmp_path.iterdir()},
        tokenizer_digest="digest",
        seed=0,
    )


def test_it_plays_what_it_is_granted_once_it_has_weights(setup, word_tokenizer) -> None:
    async def scenario() -> None:
        async with World(setup, word_tokenizer) as world:
            await world.ready()
            world.learner.send(Grant(leases=tuple(lease(i) for i in range(5))))
            await asyncio.sleep(0.1)
            assert world.engine.calls == []
            await world.give_weights(4)
            accept, formed = world.learner.told(GroupAccept)[0], world.learner.told(GroupFormed)[0]
            assert (accept.epoch, accept.workers, formed.epoch, formed.error) == (3, 1, 3, "")
            ends = await world.ends(5)
            assert {end.episode_id for end in ends} == {f"l{i}.0" for i in range(5)}
            assert all(end.status is EpisodeStatus.TERMINATED for end in ends)
            steps = world.learner.steps
            assert sorted((s.episode_id, s.index) for s in steps) == [
                (f"l{i}.0", k) for i in range(5) for k in range(2)
            ]
            assert all(step.versions[0].version == 4 for step in steps)
            await world.leave()
            assert world.engine.closed

    asyncio.run(scenario())


def test_a_grant_that_a_network_repeats_is_played_once(setup, word_tokenizer) -> None:
    async def scenario() -> None:
        async with World(setup, word_tokenizer, version=0) as world:
            await world.ready()
            world.learner.send(Grant(leases=(lease(0), lease(0))))
            await world.ends(1)
            world.learner.send(Grant(leases=(lease(0), lease(1))))
            ends = await world.ends(2)
            await world.leave()
            assert [end.episode_id for end in ends] == ["l0.0", "l1.0"]

    asyncio.run(scenario())


def test_at_most_as_many_episodes_as_configured_run_at_once(setup, word_tokenizer) -> None:
    async def scenario() -> None:
        async with World(setup, word_tokenizer, version=0) as world:
            world.engine.hold = asyncio.Event()
            await world.ready()
            world.learner.send(Grant(leases=tuple(lease(i) for i in range(7))))
            await world.learner.until(lambda: len(world.engine.calls) == 3, "three sample")
            await asyncio.sleep(0.1)
            assert len(world.engine.calls) == 3
            world.engine.hold.set()
            await world.ends(7)
            await world.leave()

    asyncio.run(scenario())


def test_environments_are_used_again_unless_they_failed(setup, word_tokenizer) -> None:
    async def scenario() -> None:
        Factory.made = 0
        async with World(setup, word_tokenizer, version=0) as world:
            await world.ready()
            for number in range(3):
                world.learner.send(Grant(leases=(lease(number),)))
                await world.ends(number + 1)
            assert Factory.made == 1
            world.learner.send(Grant(leases=(lease(3, b"fire"),)))
            (end,) = (await world.ends(4))[3:]
            assert end.status is EpisodeStatus.ENV_ERROR
            assert end.num_steps == 1
            world.learner.send(Grant(leases=(lease(4),)))
            await world.ends(5)
            assert Factory.made == 2
            await world.leave()

    asyncio.run(scenario())


def test_an_actor_outlives_the_worst_environments_and_plays_the_next_lease(
    setup, word_tokenizer
) -> None:
    async def scenario() -> None:
        async with World(setup, word_tokenizer, version=0) as world:
            await world.ready()
            for number, payload in enumerate(WORST):
                world.learner.send(Grant(leases=(lease(2 * number, payload),)))
                end = (await world.ends(2 * number + 1))[-1]
                assert end.status is EpisodeStatus.ENV_ERROR, payload
                assert end.error
                world.learner.send(Grant(leases=(lease(2 * number + 1),)))
                end = (await world.ends(2 * number + 2))[-1]
                assert end.status is EpisodeStatus.TERMINATED, payload
            await world.leave()

    asyncio.run(scenario())


def test_an_environment_that_cannot_be_made_ends_the_episode_not_the_actor(
    setup, word_tokenizer
) -> None:
    async def scenario() -> None:
        broken = msgspec.structs.replace(setup, environment_options=b'{"broken": true}')
        async with World(broken, word_tokenizer, version=0) as world:
            await world.ready()
            world.learner.send(Grant(leases=(lease(0), lease(1))))
            for end in await world.ends(2):
                assert end.status is EpisodeStatus.ENV_ERROR
                assert "no licence for the simulator" in end.error
            await world.leave()

    asyncio.run(scenario())


def test_a_revoked_episode_stops_and_nothing_more_is_told_of_it(setup, word_tokenizer) -> None:
    async def scenario() -> None:
        async with World(setup, word_tokenizer, version=0) as world:
            world.engine.hold = asyncio.Event()
            await world.ready()
            world.learner.send(Grant(leases=tuple(lease(i) for i in range(4))))
            await world.learner.until(lambda: len(world.engine.calls) == 3, "three sample")
            world.learner.send(Revoke(episode_ids=("l1.0", "l3.0"), reason="too old"))
            await asyncio.sleep(0.1)
            world.engine.hold.set()
            ends = await world.ends(2)
            await world.leave()
            assert {end.episode_id for end in ends} == {"l0.0", "l2.0"}
            assert {step.episode_id for step in world.learner.steps} == {"l0.0", "l2.0"}

    asyncio.run(scenario())


def test_draining_plays_to_the_end_delivers_and_says_goodbye(setup, word_tokenizer) -> None:
    async def scenario() -> None:
        async with World(setup, word_tokenizer, version=0) as world:
            world.engine.hold = asyncio.Event()
            await world.ready()
            world.learner.send(Grant(leases=tuple(lease(i) for i in range(5))))
            await world.learner.until(lambda: len(world.engine.calls) == 3, "three sample")
            world.learner.send(Drain(reason="the run is over"))
            await asyncio.sleep(0.1)
            assert not world.running.done()
            world.engine.hold.set()
            await asyncio.wait_for(world.running, 10)
            assert len(world.learner.ends) == 3
            assert len(world.learner.steps) == 6
            await world.learner.until(lambda: world.learner.gone, "it left")
            assert "the run is over" in world.learner.gone[0]

    asyncio.run(scenario())


def test_an_aborting_drain_drops_what_is_being_played(setup, word_tokenizer) -> None:
    async def scenario() -> None:
        async with World(setup, word_tokenizer, version=0) as world:
            world.engine.hold = asyncio.Event()
            await world.ready()
            world.learner.send(Grant(leases=(lease(0),)))
            await world.learner.until(lambda: world.engine.calls, "one samples")
            world.learner.send(Drain(reason="stop", abort=True))
            await asyncio.wait_for(world.running, 10)
            assert world.learner.ends == []

    asyncio.run(scenario())


def test_a_failed_check_of_the_weights_ends_the_actor_with_one_sentence(
    setup, word_tokenizer
) -> None:
    async def scenario() -> None:
        async with World(setup, word_tokenizer, version=0) as world:
            world.engine.hold = asyncio.Event()
            await world.ready()
            world.learner.send(Grant(leases=(lease(0),)))
            await world.learner.until(lambda: world.engine.calls, "one samples")
            world.engine.update_error = "the probe is off by 3 nats"
            await world.give_weights(1)
            world.engine.hold.set()
            with pytest.raises(EngineError, match="actor-a stops: the probe is off by 3 nats"):
                await asyncio.wait_for(world.running, 10)
            (end,) = world.learner.ends
            assert end.status is EpisodeStatus.ENGINE_ERROR
            assert world.engine.closed

    asyncio.run(scenario())


def test_a_group_that_cannot_be_joined_is_reported_and_the_actor_stays(
    setup, word_tokenizer
) -> None:
    async def scenario() -> None:
        async with World(setup, word_tokenizer, version=0) as world:
            world.engine.form_error = CapoError("no way")
            await world.ready()
            world.learner.send(GroupInvite(epoch=3))
            world.learner.send(FORM)
            await world.learner.until(lambda: world.learner.told(GroupFormed), "an answer")
            (formed,) = world.learner.told(GroupFormed)
            assert (formed.error, formed.reached) == ("no way", True)
            await world.leave()

    asyncio.run(scenario())


def test_an_engine_that_does_not_start_is_the_actors_error(setup, word_tokenizer) -> None:
    async def scenario() -> None:
        world = World(setup, word_tokenizer)
        world.start_error = EngineError("vLLM did not start: no memory")
        async with world:
            with pytest.raises(EngineError, match="no memory"):
                await asyncio.wait_for(world.running, 10)

    asyncio.run(scenario())


def test_a_refusal_is_the_actors_error(setup, word_tokenizer) -> None:
    async def scenario() -> None:
        world = World(setup, word_tokenizer)
        world.learner.refusal = "install capo-rl 0.2"
        async with world:
            with pytest.raises(RefusedError, match=r"install capo-rl 0\.2"):
                await asyncio.wait_for(world.running, 10)

    asyncio.run(scenario())


def test_a_learner_that_comes_back_finds_the_same_actor_still_playing(
    setup, word_tokenizer
) -> None:
    async def scenario() -> None:
        async with World(setup, word_tokenizer, version=2) as world:
            world.engine.hold = asyncio.Event()
            await world.ready()
            first = world.learner.hellos[-1]
            assert (first.run_id, first.tokenizer_digest, first.held_leases) == ("", "", ())
            world.learner.send(Grant(leases=(lease(0), lease(1))))
            await world.learner.until(lambda: len(world.engine.calls) == 2, "two sample")
            address = world.learner.address
            await asyncio.to_thread(world.learner.server.close)
            world.learner.server = Server(address, world.learner)
            world.learner.server.start()
            await world.learner.until(lambda: len(world.learner.hellos) > 1, "it is back")
            again = world.learner.hellos[-1]
            assert again.actor_id == first.actor_id
            assert (again.run_id, again.tokenizer_digest) == ("run-1", "digest")
            assert set(again.held_leases) == {"l0.0", "l1.0"}
            assert again.weights_version == 2
            assert again.capacity == 3
            world.engine.hold.set()
            ends = await world.ends(2)
            assert all(end.status is EpisodeStatus.TERMINATED for end in ends)
            assert len(world.learner.steps) == 4
            await world.leave()

    asyncio.run(scenario())


def test_people_see_what_it_waits_for(setup, word_tokenizer) -> None:
    async def scenario() -> None:
        async with World(setup, word_tokenizer) as world:
            await world.ready()
            await world.give_weights()
            world.learner.send(Grant(leases=(lease(0),)))
            await world.ends(1)
            await asyncio.sleep(0.05)
            await world.leave()
            assert world.lines[0].startswith("waiting for the learner at tcp://127.0.0.1")
            order = ["the engine to start", "weights", "leases"]
            places = [world.lines.index(f"waiting for {what}") for what in order]
            assert places == sorted(places)
            assert "playing" in world.lines

    asyncio.run(scenario())


def test_the_learner_hears_when_its_commits_are_waited_for(setup, word_tokenizer) -> None:
    async def scenario() -> None:
        async with World(setup, word_tokenizer, version=0) as world:
            await world.ready()
            world.learner.gate.clear()
            world.learner.send(Grant(leases=tuple(lease(i) for i in range(5))))

            def waits() -> bool:
                beats = world.learner.told(ActorHeartbeat)
                return any(
                    "the learner to commit earlier steps" in beat.waiting_for for beat in beats
                )

            await world.learner.until(waits, "it says so")
            world.learner.gate.set()
            assert len(await world.ends(5)) == 5
            await world.leave()

    asyncio.run(scenario())


def test_an_actor_that_leaves_does_not_wait_for_ever_for_a_learner_that_commits_nothing(
    setup, word_tokenizer, monkeypatch
) -> None:
    monkeypatch.setattr("capo.actors.worker.FLUSH_TIMEOUT_S", 1.0)

    async def scenario() -> None:
        async with World(setup, word_tokenizer, version=0) as world:
            await world.ready()
            world.learner.gate.clear()
            world.learner.send(Grant(leases=tuple(lease(i) for i in range(12))))
            await world.learner.until(
                lambda: any(
                    "earlier steps" in b.waiting_for for b in world.learner.told(ActorHeartbeat)
                ),
                "the window is full",
            )
            world.worker.drain("Ctrl-C")
            await asyncio.wait_for(world.running, 15)
            world.learner.gate.set()
            said = "\n".join(world.lines)
            assert "dropping 3 episodes: the learner has committed nothing for 1 s" in said
            assert "leaving without an ack: the learner at" in said
            assert "did not ack 4 deliveries" in said

    asyncio.run(scenario())
