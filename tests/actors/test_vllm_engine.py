"""A real vLLM engine: its log-probs are the model's, before, while and after weights change.

The tests share one engine and run in this order; the last ones break it on purpose.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import msgspec
import numpy as np
import pytest
import torch

from capo.protocol.errors import EngineError
from capo.protocol.messages import (
    GroupAccept,
    GroupForm,
    GroupFormed,
    GroupInvite,
    UpdateWeights,
)
from capo.protocol.records import VersionSpan
from tests.actors.engine_world import PROBE, EngineWorld, logprobs_of, tiny_policy

TOLERANCE = 1e-4
PROMPT = np.arange(5, 30, dtype=np.int32)


def random_tokens(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, 90, length).astype(np.int32)


def gap(world_policy, prompt, sample, temperature: float = 1.0) -> float:
    full = np.concatenate([prompt, sample.tokens])
    expected = logprobs_of(world_policy, full, temperature)[len(prompt) - 1 :]
    return float(np.abs(expected - sample.logprobs).max())


@torch.no_grad()
def entropies_of(policy, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """float32 [n - 1], of the distributions that predict `tokens[1:]`, by one full forward pass."""
    ids = torch.as_tensor(tokens, dtype=torch.long)[None]
    logits = policy(ids).logits[0, :-1] / temperature
    return torch.distributions.Categorical(logits=logits).entropy().numpy()


def test_without_weights_it_does_not_sample(engine_world: EngineWorld) -> None:
    assert engine_world.engine.version == -1
    with pytest.raises(EngineError, match="no weights yet"):
        engine_world.generate(PROMPT).result(60)


def test_after_the_first_broadcast_its_logprobs_are_the_models(engine_world: EngineWorld) -> None:
    policy = tiny_policy(0)
    report = engine_world.broadcast(0, policy)
    assert report.dropped == {}
    assert report.updated[0].probe_gap < TOLERANCE
    assert engine_world.engine.version == 0
    prompts = [
        np.random.default_rng(i).integers(2, 90, 5 + 9 * i).astype(np.int32) for i in range(8)
    ]
    futures = [engine_world.generate(p, seed=i, max_tokens=24) for i, p in enumerate(prompts)]
    for prompt, future in zip(prompts, futures, strict=True):
        sample = future.result(60)
        assert sample.versions == (VersionSpan(0, len(sample.tokens)),)
        assert gap(policy, prompt, sample) < TOLERANCE


def test_logprobs_are_those_of_the_temperature_that_was_sampled_at(
    engine_world: EngineWorld,
) -> None:
    sample = engine_world.generate(PROMPT, temperature=0.5, max_tokens=16).result(60)
    assert gap(engine_world.policy, PROMPT, sample, 0.5) < TOLERANCE
    assert gap(engine_world.policy, PROMPT, sample, 1.0) > 0.05


def test_greedy_takes_the_likeliest_token_with_finite_logprobs_also_beside_sampled_ones(
    engine_world: EngineWorld,
) -> None:
    futures = [engine_world.generate(PROMPT, temperature=t, max_tokens=6) for t in (0.0, 1.0, 0.0)]
    greedy, _, again = (future.result(60) for future in futures)
    np.testing.assert_array_equal(greedy.tokens, again.tokens)
    assert gap(engine_world.policy, PROMPT, greedy) < TOLERANCE
    for length in range(len(greedy.tokens)):
        prefix = np.concatenate([PROMPT, greedy.tokens[:length]])
        likeliest = max(
            range(90),
            key=lambda token: logprobs_of(engine_world.policy, np.append(prefix, token))[-1],
        )
        assert greedy.tokens[length] == likeliest


def test_the_seed_decides_the_action(engine_world: EngineWorld) -> None:
    seeds = [1, 1, 2**61, 2]
    first, same, large, other = (
        engine_world.generate(PROMPT, seed=s, max_tokens=12).result(60).tokens.tolist()
        for s in seeds
    )
    assert first == same
    assert len({tuple(first), tuple(large), tuple(other)}) == 3


def test_the_sampled_stop_token_is_part_of_the_action(engine_world: EngineWorld) -> None:
    """Every token but one stops: the action ends at once, with that token and its log-prob."""
    stop = [token for token in range(90) if token != 89]
    sample = engine_world.generate(PROMPT, stop_token_ids=stop, seed=3).result(60)
    assert sample.stopped
    assert sample.tokens[-1] in stop
    assert gap(engine_world.policy, PROMPT, sample) < TOLERANCE
    cut = engine_world.generate(PROMPT, stop_token_ids=[], max_tokens=3).result(60)
    assert not cut.stopped
    assert len(cut.tokens) == 3


def test_more_requests_than_fit_in_one_prefill_do_not_kill_it(engine_world: EngineWorld) -> None:
    prompts = [random_tokens(i, 400) for i in range(40)]
    futures = [engine_world.generate(p, seed=i, max_tokens=2) for i, p in enumerate(prompts)]
    for future in futures:
        assert len(future.result(120).tokens) >= 1


def test_a_broadcast_in_the_middle_of_actions_changes_their_version_there(
    engine_world: EngineWorld,
) -> None:
    old, new = engine_world.policy, tiny_policy(1)
    futures = [
        engine_world.generate(PROMPT, seed=s, max_tokens=450, stop_token_ids=[]) for s in range(4)
    ]
    time.sleep(0.3)
    report = engine_world.broadcast(1, new)
    assert report.dropped == {}
    for future in futures:
        sample = future.result(120)
        before, after = sample.versions
        assert (before.version, after.version) == (0, 1)
        assert before.num_tokens + after.num_tokens == 450
        full = np.concatenate([PROMPT, sample.tokens])
        under_old, under_new = (logprobs_of(p, full)[len(PROMPT) - 1 :] for p in (old, new))
        switch = before.num_tokens
        assert np.abs(under_old - sample.logprobs)[:switch].max() < TOLERANCE
        assert np.abs(under_new - sample.logprobs)[switch:].max() < TOLERANCE
        assert np.abs(under_new - sample.logprobs)[:switch].max() > 0.1


def test_many_broadcasts_over_the_same_group_stay_exact(engine_world: EngineWorld) -> None:
    epochs = set()
    for version in (2, 3, 4):
        report = engine_world.broadcast(version, tiny_policy(version))
        assert report.updated[0].probe_gap < TOLERANCE
        epochs.add(report.epoch)
    assert len(epochs) == 1
    sample = engine_world.generate(PROMPT, max_tokens=20).result(60)
    assert sample.versions[0].version == 4
    assert gap(engine_world.policy, PROMPT, sample) < TOLERANCE


def test_entropies_are_those_of_the_distribution_that_was_sampled_from(
    engine_world: EngineWorld,
) -> None:
    """From here on this engine records them; every test below runs with entropies."""
    assert engine_world.generate(PROMPT).result(60).entropies is None
    engine_world.run(engine_world.engine.record_entropies())
    temperatures = (1.0, 0.5, 1.7, 0.0)  # in one batch; greedy is measured at temperature 1
    futures = [
        engine_world.generate(PROMPT, seed=i, temperature=t, max_tokens=30)
        for i, t in enumerate(temperatures)
    ]
    for temperature, future in zip(temperatures, futures, strict=True):
        sample = future.result(60)
        full = np.concatenate([PROMPT, sample.tokens])
        expected = entropies_of(engine_world.policy, full, temperature or 1.0)[len(PROMPT) - 1 :]
        assert sample.entropies is not None
        assert sample.entropies.dtype == np.float32
        np.testing.assert_allclose(sample.entropies, expected, atol=TOLERANCE)
        assert gap(engine_world.policy, PROMPT, sample, temperature or 1.0) < TOLERANCE
        assert expected.std() > 20 * TOLERANCE  # a constant would not pass


def test_entropies_follow_the_weights_in_the_middle_of_an_action(
    engine_world: EngineWorld,
) -> None:
    old, new = engine_world.policy, tiny_policy(44)
    sampling = engine_world.generate(PROMPT, max_tokens=450, stop_token_ids=[])
    time.sleep(0.3)
    assert engine_world.broadcast(44, new).dropped == {}
    sample = sampling.result(120)
    switch = sample.versions[0].num_tokens
    assert len(sample.versions) == 2
    full = np.concatenate([PROMPT, sample.tokens])
    under_old, under_new = (entropies_of(p, full)[len(PROMPT) - 1 :] for p in (old, new))
    np.testing.assert_allclose(sample.entropies[:switch], under_old[:switch], atol=TOLERANCE)
    np.testing.assert_allclose(sample.entropies[switch:], under_new[switch:], atol=TOLERANCE)
    assert np.abs(under_new - under_old)[switch:].max() > 0.01


def test_an_impossible_token_adds_nothing_to_an_entropy(engine_world: EngineWorld) -> None:
    from capo.actors.vllm_entropy import entropy

    logprobs = torch.tensor([[0.25, 0.25, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0]]).log()
    np.testing.assert_allclose(entropy(logprobs), [1.5 * np.log(2), 0.0], atol=1e-7)


MEMBER = """
import json, sys
from capo.actors import gloo_group
form = json.loads(sys.stdin.readline())
group = gloo_group.join(form["host"], form["port"], form["epoch"], form["rank"],
                        form["world_size"], form["timeout_s"])
print("joined", flush=True)
sys.stdin.readline()
"""


class Stranger:
    """A second member in a process of its own, which is killed when the weights should come."""

    def __init__(self, world: EngineWorld) -> None:
        self.world = world
        self.process = subprocess.Popen(
            [sys.executable, "-c", MEMBER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def __call__(self, message: object) -> None:
        receive = self.world.broadcaster.receive
        if isinstance(message, GroupInvite):
            receive("stranger", GroupAccept(epoch=message.epoch))
        elif isinstance(message, GroupForm):
            threading.Thread(target=self.join, args=(message,), daemon=True).start()
        elif isinstance(message, UpdateWeights):
            self.process.kill()
            self.process.wait()
            threading.Timer(
                0.3, self.world.broadcaster.lost, ("stranger", "its process was killed")
            ).start()

    def join(self, form: GroupForm) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(msgspec.to_builtins(form)) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "joined\n"
        self.world.broadcaster.receive("stranger", GroupFormed(epoch=form.epoch))


def test_a_member_killed_in_the_transfer_leaves_the_engine_able_to_join_the_next_group(
    engine_world: EngineWorld,
) -> None:
    stranger = Stranger(engine_world)
    engine_world.others["stranger"] = stranger
    sampling = engine_world.generate(PROMPT, max_tokens=450, stop_token_ids=[])
    report = engine_world.broadcast(5, tiny_policy(5), "engine", "stranger")
    assert report.dropped == {"stranger": "its process was killed"}
    assert [member.actor_id for member in report.updated] == ["engine"]
    assert sum(span.num_tokens for span in sampling.result(120).versions) == 450
    sample = engine_world.generate(PROMPT, max_tokens=20).result(60)
    assert sample.versions[0].version == 5
    assert gap(engine_world.policy, PROMPT, sample) < TOLERANCE
    assert stranger.process.stdin is not None
    assert stranger.process.stdout is not None
    stranger.process.stdin.close()
    stranger.process.stdout.close()


def update_for(world: EngineWorld, version: int, **changes: object) -> UpdateWeights:
    payload = world.transport.stage(tiny_policy(version).named_parameters())
    fields: dict[str, object] = {
        "epoch": world.engine._group.epoch,
        "version": version,
        "tensors": payload.tensors,
        "bucket_bytes": 50_000,
        "checksum": payload.checksum,
        "probe": PROBE,
        "probe_logprobs": logprobs_of(tiny_policy(version), PROBE),
        "probe_tolerance": 1e-3,
        "timeout_s": 10.0,
    }
    return UpdateWeights(**(fields | changes))  # type: ignore[arg-type]


def test_bytes_that_changed_on_the_way_never_reach_the_model(engine_world: EngineWorld) -> None:
    update = update_for(engine_world, 6, checksum="0" * 8)
    reporting = engine_world.start(engine_world.engine.update_weights(update))
    engine_world.transport.send(50_000, 10.0)
    report = reporting.result(60)
    assert report.broke_off
    assert "checksum" in report.error
    sample = engine_world.generate(PROMPT, max_tokens=20).result(60)
    assert sample.versions[0].version == 5
    assert gap(engine_world.policy, PROMPT, sample) < TOLERANCE


def test_a_learner_that_ends_in_the_transfer_leaves_the_old_weights_in_use(
    engine_world: EngineWorld,
) -> None:
    reporting = engine_world.start(engine_world.engine.update_weights(update_for(engine_world, 6)))
    time.sleep(0.2)
    engine_world.transport.abort()
    report = reporting.result(60)
    assert report.broke_off
    assert "broke off" in report.error
    sample = engine_world.generate(PROMPT, max_tokens=20).result(60)
    assert gap(engine_world.policy, PROMPT, sample) < TOLERANCE
    engine_world.broadcaster.lost("engine", "the learner was gone")
    assert engine_world.broadcast(7, tiny_policy(7)).dropped == {}


def test_weights_of_a_foreign_epoch_are_refused(engine_world: EngineWorld) -> None:
    update = update_for(engine_world, 8, epoch=1)
    report = engine_world.run(engine_world.engine.update_weights(update))
    assert report.broke_off
    assert "not in weight group 1" in report.error


def test_a_failed_probe_stops_the_engine_and_what_it_was_sampling(
    engine_world: EngineWorld,
) -> None:
    policy = tiny_policy(9)
    sampling = engine_world.generate(PROMPT, max_tokens=450, stop_token_ids=[])
    wrong = logprobs_of(policy, PROBE) + np.float32(0.01)
    report = engine_world.broadcast(9, policy, probe_logprobs=wrong)
    assert report.updated == ()
    assert "off by 0.01" in report.dropped["engine"]
    assert engine_world.engine.version == 7
    for attempt in (sampling, engine_world.generate(PROMPT)):
        with pytest.raises(EngineError, match="does not have the learner's weights"):
            attempt.result(60)


def test_an_engine_that_hangs_is_given_up_by_name_of_the_order_it_hung_in(
    engine_world: EngineWorld,
) -> None:
    engine, limit_s = engine_world.engine, engine_world.engine._core._limit_s
    engine._core._broken = ""
    engine._core._limit_s = 2.0
    (core,) = engine._core.llm.engine_core.resources.engine_manager.processes
    os.kill(core.pid, signal.SIGSTOP)
    try:
        sampling = engine_world.generate(PROMPT)
        told = "hangs: it did not record entropies within 2 s"
        with pytest.raises(EngineError, match=told):
            engine_world.run(engine.record_entropies(), timeout_s=30)
        assert told in engine.broken
        with pytest.raises(EngineError, match=told):  # what was being sampled does not wait on
            sampling.result(30)
    finally:
        os.kill(core.pid, signal.SIGCONT)
        engine._core._limit_s = limit_s


def test_a_killed_engine_process_is_noticed_without_a_request(engine_world: EngineWorld) -> None:
    engine_world.engine._core._broken = ""
    (core,) = engine_world.engine._core.llm.engine_core.resources.engine_manager.processes
    os.kill(core.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while not engine_world.engine.broken:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(EngineError, match="died"):
        engine_world.generate(PROMPT).result(60)
