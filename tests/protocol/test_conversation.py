"""An actor and its learner through restarts, silence, a bad network and keys, on loopback."""

import asyncio
import contextlib
import logging
import signal
import sqlite3
import subprocess
import sys
import time

import pytest
import zmq

from capo.protocol.client import ActorClient
from capo.protocol.errors import PeerLostError, ProtocolError, RefusedError, StorageFullError
from capo.protocol.frames import encode
from capo.protocol.keys import generate, load_actor_keys, load_learner_keys
from capo.protocol.messages import Grant, Ready, Welcome
from capo.protocol.server import Server
from tests.protocol.clients import free_address, make_client, next_of, run, until
from tests.protocol.wire import LIMIT_S, BadNetwork, RawActor, make_end, make_hello, make_step


def test_a_slow_commit_makes_the_client_deliver_again_and_nothing_doubles(server, ledger):
    ledger.gate.clear()

    async def main():
        async with make_client(server.address, resend_after_s=0.1) as client:
            for index in range(4):
                await client.deliver([make_step(index=index)])
            await until(lambda: server.stats.duplicates > 0, "it was delivered again")
            ledger.gate.set()
            await client.flush(LIMIT_S)
        assert ledger.order == [("lease.0", index) for index in range(4)]
        assert ledger.doubled == []

    run(main())


def test_a_full_disk_pauses_the_actor_and_then_it_goes_on(server, ledger):
    ledger.window = 2
    ledger.commit_error = StorageFullError("no room for the run file")

    async def main():
        async with make_client(server.address) as client:
            tasks = [asyncio.create_task(client.deliver([make_step(index=0)]))]
            await until(lambda: client.paused == "no room for the run file", "it is told")
            tasks += [
                asyncio.create_task(client.deliver([make_step(index=index)])) for index in (1, 2)
            ]
            with pytest.raises(PeerLostError, match=r"did not ack .* no room for the run file"):
                await client.flush(0.2)
            assert ledger.committed == {}
            ledger.commit_error = None
            await asyncio.gather(*tasks)
            await client.flush(LIMIT_S)
            await until(lambda: client.paused == "", "the pause is over")
        assert ledger.order == [("lease.0", index) for index in range(3)]
        assert ledger.doubled == []

    run(main())


def test_an_actor_may_start_before_its_learner(ledger):
    address = free_address()

    async def main():
        async with make_client(address) as client:
            await client.send(Ready())
            delivering = asyncio.create_task(client.deliver([make_step()]))
            await asyncio.sleep(0.3)
            server = Server(address, ledger)
            server.start()
            try:
                await delivering
                await client.flush(LIMIT_S)
                await until(lambda: ("actor-1", Ready()) in ledger.controls, "Ready has come")
            finally:
                server.close()

    run(main())


def test_a_learner_that_comes_back_on_its_port_gets_everything_once(ledger):
    address = free_address()
    num_steps = 300

    async def main():
        server = Server(address, ledger)
        server.start()
        async with make_client(address, resend_after_s=60.0) as client:

            async def play(episode: str):
                for index in range(num_steps):
                    await client.deliver([make_step(episode, index)])
                    await asyncio.sleep(0.001)
                await client.deliver([], [make_end(episode, num_steps)])

            playing = asyncio.gather(*(play(f"lease-{n}.0") for n in range(3)))
            for restart in range(1, 4):
                reached = len(ledger.order) + 30
                await until(lambda reached=reached: len(ledger.order) > reached, "it goes on")
                await asyncio.to_thread(server.close)
                await asyncio.sleep(0.05)
                server = Server(address, ledger)
                server.start()
                await until(lambda restart=restart: len(ledger.hellos) > restart, "it is back")
            assert not playing.done()
            await playing
            await client.flush(LIMIT_S)
            server.close()
        for n in range(3):
            episode = [key for key in ledger.order if key[0] == f"lease-{n}.0"]
            assert episode == [(f"lease-{n}.0", index) for index in range(num_steps)]
        assert set(ledger.ends) == {f"lease-{n}.0" for n in range(3)}
        assert ledger.doubled == []

    run(main())


def test_a_killed_learner_process_loses_and_doubles_nothing(tmp_path):
    address = free_address()
    path = tmp_path / "steps.sqlite"
    num_steps = 400

    def start() -> subprocess.Popen:
        command = [sys.executable, "-m", "tests.protocol.learner_process", address, str(path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline().startswith("tcp://")
        return process

    def kill(process: subprocess.Popen) -> None:
        process.send_signal(signal.SIGKILL)
        process.wait(LIMIT_S)
        process.stdout.close()

    async def main():
        with contextlib.ExitStack() as stack:
            process = await asyncio.to_thread(start)
            stack.callback(lambda: kill(process))
            async with make_client(address) as client:
                playing = asyncio.create_task(play(client))
                for _ in range(2):
                    await asyncio.sleep(0.2)
                    kill(process)
                    process = await asyncio.to_thread(start)
                await playing
                await client.flush(LIMIT_S)

    async def play(client: ActorClient):
        for index in range(num_steps):
            await client.deliver([make_step(index=index)])
            await asyncio.sleep(0.001)

    run(main())
    with contextlib.closing(sqlite3.connect(path)) as database:
        rows = database.execute("select number, tokens from steps order by rowid").fetchall()
    assert [number for number, _ in rows] == list(range(num_steps))
    assert {tokens for _, tokens in rows} == {make_step().action.tobytes()}


@pytest.mark.parametrize("seed", range(2))
def test_a_bad_network_loses_and_doubles_nothing(server, ledger, seed):
    num_steps = 80

    async def main():
        with BadNetwork(server.address, seed) as network:
            options = {"resend_after_s": 0.1, "hello_timeout_s": 0.2}
            async with make_client(network.address, **options) as client:
                for index in range(num_steps):
                    await client.deliver([make_step(index=index)])
                    await asyncio.sleep(0.001)
                await client.flush(LIMIT_S)
            assert network.dropped > 0
        assert ledger.order == [("lease.0", index) for index in range(num_steps)]
        assert ledger.doubled == []

    run(main())


def test_an_actor_that_was_given_up_introduces_itself_again(server, ledger):
    ledger.dead_after_s = 0.4

    async def main():
        async with make_client(server.address) as client:
            messages = client.messages()
            await anext(messages)
            time.sleep(1.0)  # a loop that hangs
            assert [actor for actor, _ in ledger.losses] == ["actor-1"]
            assert isinstance(await anext(messages), Welcome)
            await client.deliver([make_step()])
            await client.flush(LIMIT_S)

    run(main())


def test_a_learner_that_falls_silent_is_connected_to_again():
    """A frozen process keeps its connection, so silence is the only sign."""

    async def main():
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            welcome = Welcome(
                run_id="r",
                learner_name="frozen",
                last_sequence=0,
                window=4,
                heartbeat_s=0.1,
                dead_after_s=0.3,
                setup=None,
            )
            async with make_client(f"tcp://127.0.0.1:{port}") as client:
                identities = set()
                while len(identities) < 2:
                    await asyncio.sleep(0.01)
                    while socket.poll(0):
                        identity, header, *_ = socket.recv_multipart()
                        if b"Hello" in header:
                            identities.add(identity)
                            socket.send_multipart([identity, *encode(welcome)])
                messages = client.messages()
                assert isinstance(await anext(messages), Welcome)
                assert isinstance(await anext(messages), Welcome)

    run(main())


def test_a_learner_that_never_answers_hello_is_asked_again():
    async def main():
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            async with make_client(f"tcp://127.0.0.1:{port}"):
                identities = set()
                while len(identities) < 2:
                    await asyncio.sleep(0.01)
                    while socket.poll(0):
                        identities.add(socket.recv_multipart()[0])

    run(main())


def test_a_long_wait_is_logged_and_patience_ends_with_an_error(caplog):
    address = free_address()
    caplog.set_level(logging.WARNING)

    async def main():
        async with make_client(address, log_after_s=0.2, patience_s=0.6) as client:
            with pytest.raises(PeerLostError, match=f"no contact with the learner at {address}"):
                await anext(client.messages())

    run(main())
    assert f"waiting for the learner at {address} since" in caplog.text
    assert "nothing is listening there" in caplog.text


def test_a_learner_of_another_run_is_refused(ledger):
    address = free_address()

    async def main():
        async with make_client(address) as client:
            server = Server(address, ledger)
            server.start()
            messages = client.messages()
            await anext(messages)
            server.close()
            ledger.run_id = "run-2"
            server = Server(address, ledger)
            server.start()
            with pytest.raises(RefusedError, match="now works on run run-2, this actor on run-1"):
                await anext(messages)
            server.close()

    run(main())


def test_a_learner_whose_run_file_lost_its_end_is_an_error(ledger):
    address = free_address()

    async def main():
        async with make_client(address) as client:
            server = Server(address, ledger)
            server.start()
            await client.deliver([make_step()])
            await client.flush(LIMIT_S)
            server.close()
            ledger.last.clear()
            server = Server(address, ledger)
            server.start()
            with pytest.raises(ProtocolError, match="acked deliveries up to 1 but now knows only"):
                await next_of(client.messages(), Grant)
            server.close()

    run(main())


def test_garbage_from_a_learner_is_an_error_of_the_client():
    async def main():
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            async with make_client(f"tcp://127.0.0.1:{port}") as client:
                identity, *_ = await asyncio.to_thread(socket.recv_multipart)
                socket.send_multipart([identity, b"\xc1"])
                with pytest.raises(ProtocolError, match="cannot be read"):
                    await anext(client.messages())

    run(main())


@pytest.fixture
def key_files(tmp_path):
    learner, actor = generate(tmp_path / "ours")
    other_learner, other_actor = generate(tmp_path / "theirs")
    return learner, actor, other_learner, other_actor


@pytest.fixture
def guarded_server(ledger, key_files):
    server = Server("tcp://127.0.0.1:0", ledger, keys=load_learner_keys(key_files[0]))
    server.address = server.start()
    yield server
    server.close()


def test_a_known_key_is_let_in(guarded_server, ledger, key_files):
    async def main():
        keys = load_actor_keys(key_files[1])
        async with make_client(guarded_server.address, keys=keys) as client:
            await client.deliver([make_step()])
            await client.flush(LIMIT_S)

    run(main())
    assert ledger.order == [("lease.0", 0)]


def test_an_unknown_key_is_refused_with_a_sentence(guarded_server, ledger, key_files):
    stranger = load_actor_keys(key_files[3])
    learner = load_actor_keys(key_files[1]).learner
    keys = type(stranger)(public=stranger.public, secret=stranger.secret, learner=learner)

    async def main():
        async with make_client(guarded_server.address, keys=keys) as client:
            with pytest.raises(RefusedError, match="does not accept this actor's key"):
                await anext(client.messages())

    run(main())
    assert ledger.hellos == []


@pytest.mark.parametrize("with_keys", [True, False], ids=["another learner's key", "no keys"])
def test_a_connection_without_the_right_keys_gets_nowhere(
    guarded_server, ledger, key_files, with_keys
):
    keys = load_actor_keys(key_files[3]) if with_keys else None

    async def main():
        async with make_client(guarded_server.address, keys=keys, patience_s=0.5) as client:
            with pytest.raises(
                PeerLostError, match="no handshake: the learner's key does not match"
            ):
                await anext(client.messages())

    run(main())
    assert ledger.hellos == []


def test_an_actor_gets_in_once_the_learner_comes_back_without_keys(ledger, key_files):
    address = free_address()

    async def main():
        server = Server(address, ledger, keys=load_learner_keys(key_files[0]))
        server.start()
        async with make_client(address) as client:
            await asyncio.sleep(0.3)
            assert ledger.hellos == []
            server.close()
            server = Server(address, ledger)
            server.start()
            assert isinstance(await anext(client.messages()), Welcome)
        server.close()

    run(main())


def test_a_bare_stranger_of_a_guarded_server_hears_nothing(guarded_server, ledger):
    with RawActor(guarded_server.address) as stranger:
        stranger.send(make_hello())
        stranger.deliver(1, make_step())
        assert stranger.receive(0.3) is None
    assert ledger.hellos == []


def test_a_client_with_keys_does_not_speak_to_an_open_server(server, ledger, key_files):
    async def main():
        keys = load_actor_keys(key_files[1])
        async with make_client(server.address, keys=keys, patience_s=0.5) as client:
            with pytest.raises(
                PeerLostError, match="no handshake: the learner's key does not match"
            ):
                await anext(client.messages())

    run(main())
    assert ledger.hellos == []
