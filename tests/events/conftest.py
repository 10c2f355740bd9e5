"""A broker for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.events.mosquitto import Mosquitto, mosquitto


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Mosquitto]:
    """A running broker that lets everybody do everything."""
    if mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    broker = Mosquitto(tmp_path)
    broker.start()
    yield broker
    broker.kill()
