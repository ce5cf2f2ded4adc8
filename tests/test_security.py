"""docs/security.md, claim by claim: whose an actor id is, and what no module may ever do."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zmq
from msgspec.structs import replace

from capo.configs.load import load, to_json
from capo.learner.model import Precision, load_critic, load_policy
from capo.learner.run_file import RunFile
from capo.protocol.handshake import KeyHolders
from capo.protocol.keys import ActorKeys, generate, load_actor_keys, load_learner_keys
from capo.protocol.messages import Ack, Drain, Ready, Refused, Reintroduce
from capo.protocol.server import Server
from tests.factories import tiny_policy
from tests.protocol.wire import Ledger, RawActor, make_hello, make_step, wait_until

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocol", "configs", "envs", "actors", "learner", "launch")
FILES = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]

# Names whose use would unpickle or pickle something, or run code that came as data.
PICKLING_MODULES = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
PICKLING_CALLS = {
    "torch.load",
    "torch.save",
    "torch.hub.load",
    "numpy.save",
    "numpy.savez",
    "pandas.read_pickle",
    "yaml.load",
    "yaml.unsafe_load",
}
PICKLING_METHODS = {
    "send_pyobj",  # pyzmq
    "recv_pyobj",
    "broadcast_object_list",  # torch.distributed
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "save_checkpoint",  # DeepSpeed's own, which is torch.save
    "load_checkpoint",
}
RUNNING_CALLS = {"eval", "exec", "compile", "__import__"}


# Whose an actor id is


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def keys(tmp_path) -> list[ActorKeys]:
    return [load_actor_keys(path) for path in generate(tmp_path, ["one", "two"])[1:]]


@pytest.fixture
def server(ledger, keys, tmp_path):
    server = Server("tcp://127.0.0.1:0", ledger, keys=load_learner_keys(tmp_path / "learner.key"))
    server.address = server.start()
    yield server
    server.close()


def named(keys: ActorKeys, routing_id: bytes) -> Callable[[zmq.Socket], None]:
    def apply(socket: zmq.Socket) -> None:
        keys.apply(socket)
        socket.setsockopt(zmq.ROUTING_ID, routing_id)

    return apply


def test_another_key_cannot_take_over_an_actor(server, ledger, keys):
    with RawActor(server.address, keys[0].apply) as actor:
        actor.introduce("actor-1")
        with RawActor(server.address, keys[1].apply) as thief:
            thief.send(make_hello("actor-1"))
            refused = thief.receive()
            assert isinstance(refused, Refused)
            assert "belongs to the key that introduced it first" in refused.reason
            thief.deliver(1, make_step())
            assert isinstance(thief.receive(), Reintroduce)
        server.send("actor-1", Drain(reason="now"))
        assert actor.receive() == Drain(reason="now")
        actor.deliver(1, make_step())
        assert actor.receive() == Ack(sequence=1)
    assert [hello.actor_id for hello in ledger.hellos] == ["actor-1"]
    assert ledger.losses == []
    assert server.stats.refused == 1


def test_an_actor_that_is_gone_still_has_its_id(server, ledger, keys):
    ledger.dead_after_s = 0.3
    with RawActor(server.address, keys[0].apply) as actor:
        actor.introduce("actor-1")
    wait_until(lambda: ledger.losses != [], "it is given up")
    with RawActor(server.address, keys[1].apply) as thief:
        thief.send(make_hello("actor-1"))
        assert isinstance(thief.receive(), Refused)
    ledger.dead_after_s = 10.0
    with RawActor(server.address, keys[0].apply) as actor:
        actor.introduce("actor-1")


def test_two_keys_are_two_actors(server, ledger, keys):
    with (
        RawActor(server.address, keys[0].apply) as one,
        RawActor(server.address, keys[1].apply) as two,
    ):
        one.introduce("one")
        two.introduce("two")
        for actor, episode in ((one, "a.0"), (two, "b.0")):
            actor.deliver(1, make_step(episode))
            assert actor.receive() == Ack(sequence=1)


def test_a_routing_id_does_not_make_another_key_the_actor(server, ledger, keys):
    """Peers choose their routing ids, and whoever comes after a cut may choose a used one."""
    with RawActor(server.address, named(keys[0], b"same")) as actor:
        actor.introduce("actor-1")
    heard = None
    while heard is None:  # as long as the old connection stands, another of its name is not taken
        with RawActor(server.address, named(keys[1], b"same")) as thief:
            thief.send(Ready(weights_version=7))
            heard = thief.receive(0.5)
    assert isinstance(heard, Reintroduce)
    assert ledger.controls == []
    with RawActor(server.address, keys[0].apply) as actor:
        actor.introduce("actor-1")
        actor.deliver(1, make_step())
        assert actor.receive() == Ack(sequence=1)


def test_ids_that_a_key_makes_up_push_out_only_its_own():
    holders = KeyHolders(max_ids_per_key=3)
    assert holders.refusal("mine", "key-1") == ""
    for number in range(10):
        assert holders.refusal(f"made-up-{number}", "key-2") == ""
    assert holders.refusal("mine", "key-2") != ""
    assert holders.refusal("made-up-9", "key-1") != ""
    assert holders.refusal("made-up-0", "key-1") == ""


# What no module does


def imports_of(tree: ast.Module) -> dict[str, str]:
    """Local name -> what it stands for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    return names


def called(call: ast.Call, names: dict[str, str]) -> str:
    """What is called, as module.name where that can be seen, else the method's name."""
    parts = []
    function: ast.expr = call.func
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if isinstance(function, ast.Name):
        parts.append(names.get(function.id, function.id))
    return ".".join(reversed(parts))


def calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    tree = ast.parse(source)
    names = imports_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield called(node, names), node


def faults(source: str) -> list[str]:
    """What in `source` could reach pickle, or run what came as data."""
    found = [
        f"imports {name}"
        for name in imports_of(ast.parse(source)).values()
        if name.split(".")[0] in PICKLING_MODULES
    ]
    for name, call in calls(source):
        arguments = {keyword.arg: keyword.value for keyword in call.keywords}
        if name in PICKLING_CALLS or name.split(".")[-1] in PICKLING_METHODS:
            found.append(f"calls {name}")
        if name in RUNNING_CALLS:
            found.append(f"calls {name}")
        if name == "numpy.load" or "allow_pickle" in arguments:
            found.append(f"calls {name}, which can unpickle")
        if name.startswith("multiprocessing.") and name.split(".")[-1] in (
            "Queue",
            "Pipe",
            "Manager",
        ):
            found.append(f"calls {name}, which pickles")
        trusted = arguments.get("trust_remote_code")
        if trusted is not None and not (
            isinstance(trusted, ast.Constant) and trusted.value is False
        ):
            found.append(f"{name} may run code of a model")
        if (
            name.split(".")[-1] == "from_pretrained"
            and "ModelFor" in name
            and not ("use_safetensors" in arguments or "gguf_file" in arguments)
        ):
            found.append(f"{name} may read weights that are no safetensors")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_module_reaches_pickle_or_runs_data(file: Path) -> None:
    assert faults(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import torch\ntorch.load(path, weights_only=False)",
        "from torch import load as read\nread(path)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import joblib",
        "from yaml import load\nload(text)",
        "socket.recv_pyobj()",
        "from torch import distributed\ndistributed.broadcast_object_list(x)",
        "import multiprocessing\nmultiprocessing.Queue()",
        "eval(text)",
        "from transformers import AutoConfig as C\nC.from_pretrained(x, trust_remote_code=True)",
        "from transformers import AutoModelForCausalLM as A\nA.from_pretrained(folder)",
    ],
)
def test_the_search_for_pickle_finds_it(source: str) -> None:
    assert faults(source) != []


class Trap:
    """A file is made when this is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self):
        return (Path.touch, (self.made,))


@pytest.mark.parametrize("load", [load_policy, load_critic])
def test_a_model_whose_weights_are_a_pickle_is_not_loaded(load, tmp_path) -> None:
    folder = tiny_policy(tmp_path)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    torch.save({"trap": Trap(tmp_path / "sprung")}, folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load(folder, Precision(torch.float32, torch.float32), torch.device("cpu"))
    assert not (tmp_path / "sprung").exists()


VLLM_FILES = [file for file in FILES if "vllm" in file.read_text(encoding="utf-8").lower()]


def test_a_run_file_cannot_name_a_command_as_its_environment(tmp_path) -> None:
    """`subprocess.run({"touch": 1, PATH: 2})` would be `touch PATH`."""
    mark = tmp_path / "mark"
    config = load("quickstart", [f'run_dir="{tmp_path / "run"}"'])
    environment = replace(config.environment, factory="subprocess:run")
    environment = replace(environment, options={"touch": 1, str(mark): 2})
    facts = {"run_id": "r", "config": to_json(replace(config, environment=environment)).decode()}
    RunFile.create(tmp_path / "run", facts).close()
    done = subprocess.run(
        [sys.executable, "-m", "capo.launch.main", "learner", "--resume", str(tmp_path / "run")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "'subprocess:run' is a function and was not called" in done.stderr
    assert not mark.exists()


def test_vllms_rpc_gets_method_names_and_plain_arguments() -> None:
    """Anything but a name would travel pickled (a function), which vLLM refuses unless asked."""
    methods = {
        node.name
        for node in ast.walk(ast.parse((ROOT / "actors/vllm_weights.py").read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    seen = set()
    for file in VLLM_FILES:
        for name, call in calls(file.read_text(encoding="utf-8")):
            if name.split(".")[-1] == "collective_rpc":
                assert isinstance(call.args[0], ast.Constant), f"{file.name}:{call.lineno}"
                method = call.args[0].value
                assert method in methods, f"{file.name}:{call.lineno}: {method!r}"
                seen.add(method)
                for argument in [*call.args[1:], *(keyword.value for keyword in call.keywords)]:
                    callables = [n for n in ast.walk(argument) if isinstance(n, ast.Lambda)]
                    assert callables == [], f"{file.name}:{call.lineno}"
    assert seen == {"capo_record_entropies", "capo_stage", "capo_state"}


def test_vllm_is_never_asked_to_unpickle() -> None:
    for file in FILES:
        assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in file.read_text(encoding="utf-8"), file
    for config in (ROOT / "configs").glob("*.toml"):
        assert "INSECURE_SERIALIZATION" not in config.read_text(encoding="utf-8"), config
