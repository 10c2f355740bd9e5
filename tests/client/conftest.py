"""What the tests of the SDK share."""

import threading
from collections.abc import Iterator

import pytest

from tests.client.fake_router import FakeRouter


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    server = FakeRouter()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
