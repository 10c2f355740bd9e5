"""Fixtures of the whole suite."""

import gc
import logging
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from plexrl.process.garbage_collection import rare_collections
from tests import warm_forks
from tests.core_files import pytest_ignore_collect, pytest_pycollect_makemodule
from tests.examples import examples
from tests.lost_workers import (
    pytest_collection_modifyitems,
    pytest_runtest_setup,
    pytest_xdist_make_scheduler,
)
from tests.warm_forks import own_fork_servers

__all__ = [
    "own_fork_servers",
    "pytest_collection_modifyitems",
    "pytest_ignore_collect",
    "pytest_pycollect_makemodule",
    "pytest_runtest_setup",
    "pytest_xdist_make_scheduler",
]

# How long an example takes says nothing on a machine that others use too.
# `make test` tries the same cases each time, so that a change is not blamed for a fault that was
# there before it; `make test-all` and a test that is run by itself draw new ones.
settings.register_profile(
    "plexrl",
    deadline=None,
    print_blob=True,
    max_examples=examples(40),
    derandomize=examples(100) < 100,
)
settings.load_profile("plexrl")

# Two torch threads beside any other work slow both up to tenfold; set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# pytest-xdist sets it; commands would take it for a terminal's width.
os.environ.pop("COLUMNS", None)
# Without bytecode files, each of the many processes that tests start compiles its modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A process has one fork server. If the first test to use it did not need torch, each rank of each
# later test would load torch for itself, which takes five seconds.
multiprocessing.set_forkserver_preload(
    [
        "plexrl.worker.agent.fork_server.preload",
        "plexrl.worker.training.megatron.model",
        "tests.statemanager.soak_worker",
    ]
)

ROOMS = ("scheduler", "statemanager", "router", "worker", "rollout", "sim", "traces")


def pytest_addoption(parser: pytest.Parser) -> None:
    """What the whole suite can be told."""
    parser.addoption("--core", action="store_true", help="only tests that need no torch")
    parser.addoption("--fault-seed", default="1", help="of the moments and victims of fault runs")
    parser.addoption("--fault-seconds", default="240", help="of faults in tests/hosts")
    parser.addoption("--fault-cuts", default="5", help="power cuts of each run in tests/faults")
    parser.addoption(
        "--rollout-histories", default=examples(400), help="random ones in tests/rollout"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuses to test what is no longer in the files: C extensions go before their sources."""
    for compiled in (config.rootpath / "plexrl").rglob("*.so"):
        source = compiled.with_name(compiled.name.partition(".")[0] + ".py")
        if _is_newer(source, compiled):
            pytest.exit(
                f"{source} is newer than what was compiled of it: make compiled, or make pure", 4
            )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects tests with few garbage collections: what is imported is never freed."""
    with rare_collections():
        collected = yield
        gc.freeze()
    return collected


def pytest_unconfigure() -> None:
    """Tests leave jobs behind on purpose: at the end of the process nobody wants to read of it."""
    logging.getLogger("plexrl.client.calls.job_exit").setLevel(logging.CRITICAL)


def _is_newer(source: Path, compiled: Path) -> bool:
    return not source.exists() or source.stat().st_mtime > compiled.stat().st_mtime


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_written_to_the_users_data_directory() -> Iterator[None]:
    """Scripts and commands that name no data directory get one that goes with the run."""
    with tempfile.TemporaryDirectory(prefix="plexrl-tests-") as folder:
        os.environ["PLEXRL_DATA_DIR"] = f"{folder}/data"
        yield


@pytest.fixture(scope="session", autouse=True)
def _clusters_do_not_load_torch_anew() -> Iterator[None]:
    with warm_forks.offered():
        yield


@pytest.fixture(scope="session", autouse=True)
def _each_room_has_one_import_name() -> Iterator[None]:
    """Fails the run if a room was imported through the door at the top of the tree."""
    yield
    twice = [room for room in ROOMS if room in sys.modules]
    assert not twice, f"imported by their bare names: {twice}; import plexrl.<room> instead"
