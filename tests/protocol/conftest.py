"""A server whose handler remembers like a run file."""

import pytest

from capo.protocol.server import Server
from tests.protocol.wire import Ledger


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def server(ledger):
    server = Server("tcp://127.0.0.1:0", ledger)
    server.address = server.start()
    yield server
    ledger.gate.set()
    if server.failure is None:
        server.close()
