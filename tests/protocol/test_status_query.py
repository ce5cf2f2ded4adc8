"""A learner tells its status to whoever may connect, and says why not to everybody else."""

import socket
import time
from threading import Thread

import pytest
import zmq

from capo.protocol.errors import PeerLostError, RefusedError
from capo.protocol.frames import encode
from capo.protocol.keys import add_actor, generate, load_actor_keys, load_learner_keys
from capo.protocol.messages import Refused, StatusRequest
from capo.protocol.server import Server
from capo.protocol.status_query import ask_status
from tests.protocol.wire import RawActor


def test_the_handlers_report_comes_back_and_no_actor_is_made_of_who_asked(server, ledger):
    assert ask_status(server.address) == ledger.report()
    assert ledger.hellos == ledger.losses == []
    assert server.stats.strangers == server.stats.refused == 0


def test_an_actor_may_ask_on_its_own_connection_and_stays_one(server, ledger):
    with RawActor(server.address) as actor:
        actor.introduce()
        actor.send(StatusRequest())
        assert actor.receive().status == ledger.report()
    assert ledger.losses == []


def test_where_nobody_listens_it_says_so():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PeerLostError, match=r"no status from .* nothing is listening there"):
            ask_status(address, timeout_s=1.0)


def test_who_takes_the_connection_but_is_stuck_is_told_apart():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        silent.setsockopt(zmq.LINGER, 0)
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        started = time.monotonic()
        with pytest.raises(PeerLostError, match="frozen or stuck"):
            ask_status(f"tcp://127.0.0.1:{port}", timeout_s=0.5)
        assert time.monotonic() - started < 5.0


def test_a_learner_that_came_back_is_asked_again(ledger):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as first:
        first.setsockopt(zmq.LINGER, 0)
        address = f"tcp://127.0.0.1:{first.bind_to_random_port('tcp://127.0.0.1')}"
        answers: list[bytes] = []
        asking = Thread(target=lambda: answers.append(ask_status(address)))
        asking.start()
        assert first.poll(5000)  # it got the question, and ends before it answers
    second = Server(address, ledger)
    second.start()
    asking.join(20)
    second.close()
    assert answers == [ledger.report()]


def test_a_name_that_nobody_has_is_told_at_once():
    with pytest.raises(PeerLostError, match="there is no machine named 'no-such-host"):
        ask_status("tcp://no-such-host.invalid:5555")


def test_a_learner_with_keys_answers_those_it_lets_in_alone(tmp_path, ledger):
    learner_path, actor_path = generate(tmp_path / "keys")
    server = Server("tcp://127.0.0.1:0", ledger, keys=load_learner_keys(learner_path))
    address = server.start()
    stranger = load_actor_keys(add_actor(tmp_path / "keys", "late"))  # after the learner's start
    try:
        assert ask_status(address, load_actor_keys(actor_path)) == ledger.report()
        with pytest.raises(RefusedError, match="does not accept this key"):
            ask_status(address, stranger)
        with pytest.raises((PeerLostError, RefusedError), match="only one side uses keys"):
            ask_status(address, timeout_s=2.0)
    finally:
        server.close()


def test_one_of_an_older_version_is_told_what_is_wrong():
    with zmq.Context() as context, context.socket(zmq.ROUTER) as older:
        older.setsockopt(zmq.LINGER, 0)
        port = older.bind_to_random_port("tcp://127.0.0.1")

        def refuse():
            identity = older.recv_multipart()[0]
            older.send_multipart([identity, *encode(Refused(reason="no such message"))])

        answering = Thread(target=refuse)
        answering.start()
        with pytest.raises(RefusedError, match="no such message"):
            ask_status(f"tcp://127.0.0.1:{port}")
        answering.join()
