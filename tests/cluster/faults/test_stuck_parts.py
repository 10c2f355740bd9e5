"""A stopped worker is named, killed and replaced, and a removed folder made again; no step is lost.
`test_stopped_parts.py` stops everything, with a rollout."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from plexrl.process.folders.folders import Folders
from tests.cluster.tools import (
    VOCABULARY,
    checkpoint_weights,
    process_of,
    rank_process,
    train,
    wait_until,
    weights_after,
)

if TYPE_CHECKING:
    import psutil

MODEL = plexrl.tiny_qwen2(VOCABULARY)
STUCK_S = 6.0
STEPS = 4


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    """A cluster that replaces what is silent for a few seconds."""
    running = start_embedded(
        tmp_path_factory.mktemp("impatient"), virtual_gpus=4, part_stuck_s=STUCK_S
    )
    yield running
    running.close()


@pytest.fixture(scope="module")
def undisturbed(impatient: EmbeddedCluster) -> bytes:
    return weights_after(impatient, MODEL, STEPS)


def is_named(cluster: plexrl.Cluster, text: str) -> bool:
    """Whether `plexrl status` shows that a part with `text` in its name is stuck."""
    found = cluster.status()["conditions"]
    return any(each["code"] == "part_stuck" and text in each["message"] for each in found)


def trained_through(
    impatient: EmbeddedCluster, victim: str, *, named: str = "", folder: Path | None = None
) -> tuple[bytes, int]:
    """(weights, incarnation of the workers) of a job while `victim` is stopped for ever, or
    `folder` removed, between two of its steps."""
    with (
        plexrl.connect(impatient.url, impatient.api_key) as cluster,
        cluster.create_job("disturbed") as job,
    ):
        actor = job.train_deployment("actor", MODEL, workers=2)
        train(actor, 0).result()
        stopped: psutil.Process | None = None
        if folder is not None:
            # Parts make it again while it is being removed, if it is removed in place.
            shutil.rmtree(folder.rename(folder.with_name("gone")))
        else:
            is_rank = victim == "a rank"
            stopped = rank_process(actor, 1) if is_rank else process_of(impatient, victim)
            stopped.suspend()
        futures = [train(actor, step) for step in range(1, STEPS)]
        if named:
            wait_until(lambda: is_named(cluster, named), "no condition names it")
        for future in futures:
            future.result()
        if stopped is not None:
            wait_until(lambda: not stopped.is_running(), "it was not replaced")
            wait_until(lambda: not cluster.status()["conditions"], "it does not serve")
        return checkpoint_weights(actor), actor.status()["incarnation"]


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "named"), [("a rank", "rank 1")])
def test_a_stopped_worker_is_named_and_replaced(
    impatient: EmbeddedCluster, undisturbed: bytes, victim: str, named: str
) -> None:
    weights, incarnation = trained_through(impatient, victim, named=named)
    assert weights == undisturbed
    assert incarnation > 1, "it was not replaced"


@pytest.mark.slow
def test_a_removed_runtime_folder_is_made_again(
    impatient: EmbeddedCluster, undisturbed: bytes
) -> None:
    folders = Folders.of(impatient.data_dir)
    weights, _ = trained_through(impatient, "", folder=folders.run)
    assert weights == undisturbed
    assert folders.run.is_dir()
