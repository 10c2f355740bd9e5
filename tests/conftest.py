"""Fixtures of the whole suite."""

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

# How long an example takes says nothing on a machine that others use too.
settings.register_profile("plexrl", deadline=None)
settings.load_profile("plexrl")

# Two torch threads beside any other work slow both up to tenfold; set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOMS = ("scheduler", "statemanager", "router", "worker", "rollout", "sim", "traces")


@pytest.fixture(scope="session", autouse=True)
def _each_room_has_one_import_name() -> Iterator[None]:
    """Fails the run if a room was imported through the door at the top of the tree."""
    yield
    twice = [room for room in ROOMS if room in sys.modules]
    assert not twice, f"imported by their bare names: {twice}; import plexrl.<room> instead"
