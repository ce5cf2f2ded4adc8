"""Key files, and when keys are a must."""

import stat

import pytest
import zmq

from capo.protocol.errors import ConfigError
from capo.protocol.keys import (
    add_actor,
    check_bind,
    generate,
    is_loopback,
    load_actor_keys,
    load_learner_keys,
)


def test_generated_files_are_private_and_fit_together(tmp_path):
    paths = generate(tmp_path / "keys", ["gpu-1", "gpu-2"])
    assert [path.name for path in paths] == ["learner.key", "gpu-1.key", "gpu-2.key"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths} == {0o600}
    learner = load_learner_keys(paths[0])
    actors = [load_actor_keys(path) for path in paths[1:]]
    assert learner.actors == tuple(actor.public for actor in actors)
    assert {actor.learner for actor in actors} == {learner.public}
    for keys in (learner, *actors):
        assert zmq.curve_public(keys.secret.encode()).decode() == keys.public


def test_secrets_are_not_printed(tmp_path):
    learner_path, actor_path = generate(tmp_path)
    for keys in (load_learner_keys(learner_path), load_actor_keys(actor_path)):
        assert keys.secret not in repr(keys)


def test_keys_in_use_are_not_overwritten(tmp_path):
    learner_path, _ = generate(tmp_path)
    before = learner_path.read_text()
    with pytest.raises(ConfigError, match="exists; choose another folder"):
        generate(tmp_path)
    assert learner_path.read_text() == before


@pytest.mark.parametrize("names", [[], ["a", "a"], ["learner"], ["../a"], ["a/b"], [""]])
def test_bad_names_are_refused(tmp_path, names):
    with pytest.raises(ConfigError, match="names"):
        generate(tmp_path, names)


def test_an_actor_can_be_added_later(tmp_path):
    learner_path, actor_path = generate(tmp_path)
    added = load_actor_keys(add_actor(tmp_path, "late"))
    learner = load_learner_keys(learner_path)
    assert learner.actors == (load_actor_keys(actor_path).public, added.public)
    assert stat.S_IMODE(learner_path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="exists; choose another name"):
        add_actor(tmp_path, "late")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the key file .*no\.key: No such file"):
        load_actor_keys(tmp_path / "no.key")


def test_a_file_that_others_can_read_is_refused(tmp_path):
    _, actor_path = generate(tmp_path)
    actor_path.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others; run: chmod 600"):
        load_actor_keys(actor_path)


def test_the_other_sides_file_is_refused(tmp_path):
    learner_path, actor_path = generate(tmp_path)
    with pytest.raises(ConfigError, match="not a key file for the role 'actor'"):
        load_actor_keys(learner_path)
    with pytest.raises(ConfigError, match="not a key file for the role 'learner'"):
        load_learner_keys(actor_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda text: "not toml", "is not a key file of"),
        (lambda text: text.replace('role = "actor"', ""), "not a key file for the role 'actor'"),
        (lambda text: text + 'extra = "1"\n', "is not a valid key file.*extra"),
        (lambda text: text.replace("secret =", "secret = 3 #"), "is not a valid key file"),
    ],
)
def test_a_broken_file_is_refused_with_its_reason(tmp_path, change, sentence):
    _, actor_path = generate(tmp_path)
    actor_path.write_text(change(actor_path.read_text()))
    with pytest.raises(ConfigError, match=sentence):
        load_actor_keys(actor_path)


@pytest.mark.parametrize("bad", ["x" * 40, "é" * 40, "short", "#" * 40])
def test_a_damaged_key_is_refused(tmp_path, bad):
    _, actor_path = generate(tmp_path)
    keys = load_actor_keys(actor_path)
    actor_path.write_text(actor_path.read_text().replace(keys.learner, bad))
    if bad == "x" * 40:  # well-formed; only the learner can tell
        assert load_actor_keys(actor_path).learner == bad
        return
    with pytest.raises(ConfigError, match="not 40 characters of Z85"):
        load_actor_keys(actor_path)


def test_a_secret_of_another_pair_is_refused(tmp_path):
    _, one = generate(tmp_path / "1")
    _, two = generate(tmp_path / "2")
    mixed = one.read_text().replace(load_actor_keys(one).secret, load_actor_keys(two).secret)
    one.write_text(mixed)
    with pytest.raises(ConfigError, match="does not belong to the public key"):
        load_actor_keys(one)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:0",
        "tcp://127.1.2.3:5",
        "tcp://localhost:5",
        "tcp://lo:5",
        "tcp://[::1]:5",
        "ipc:///run/x",
        "inproc://x",
    ],
)
def test_loopback_needs_no_keys(address):
    assert is_loopback(address)
    check_bind(address, None, insecure=False)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://0.0.0.0:5",
        "tcp://*:5",
        "tcp://10.0.0.1:5",
        "tcp://[::]:5",
        "tcp://eth0:5",
        "tcp://127.evil.example:5",
        "tcp://127.0.0.1.evil.example:5",
        "127.0.0.1:5",
    ],
)
def test_any_other_address_needs_keys_or_insecure(tmp_path, address):
    with pytest.raises(ConfigError, match="there are no keys"):
        check_bind(address, None, insecure=False)
    check_bind(address, None, insecure=True)
    learner_path, _ = generate(tmp_path)
    check_bind(address, load_learner_keys(learner_path), insecure=False)
