"""A part or a worker that is stopped for ever is named, killed and replaced; no step is lost."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import plexrl
from plexrl import errors
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from plexrl.cluster.node.parts import rollout_address
from plexrl.process.folders.folders import Folders
from plexrl.router.execution.rollout_link import RolloutLink
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


@pytest.mark.parametrize(
    ("module", "named"),
    [
        ("plexrl.statemanager", "node0"),
        pytest.param("plexrl.router", "", marks=pytest.mark.slow),
        pytest.param("plexrl.scheduler", "", marks=pytest.mark.slow),
        pytest.param("plexrl.worker", "agent-node0", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_part_is_replaced(
    impatient: EmbeddedCluster, undisturbed: bytes, module: str, named: str
) -> None:
    before = process_of(impatient, module).pid
    weights, _ = trained_through(impatient, module, named=named)
    assert weights == undisturbed
    assert process_of(impatient, module).pid != before, "it was not replaced"


@pytest.mark.slow
def test_a_removed_runtime_folder_is_made_again(
    impatient: EmbeddedCluster, undisturbed: bytes
) -> None:
    folders = Folders.of(impatient.data_dir)
    weights, _ = trained_through(impatient, "", folder=folders.run)
    assert weights == undisturbed
    assert folders.run.is_dir()


async def refusal_code(impatient: EmbeddedCluster) -> str:
    """The code with which the rollout service refuses an empty order; starts the service."""
    link = RolloutLink(str(rollout_address(Folders.of(impatient.data_dir))), None)
    try:
        with pytest.raises(errors.PlexRLError) as refused:
            await link.call("create", {"order": {}}, timeout_s=10)
    finally:
        await link.close()
    return refused.value.code


def serves(impatient: EmbeddedCluster) -> bool:
    return asyncio.run(refusal_code(impatient)) == errors.InvalidRequestError.code


@pytest.mark.slow
def test_a_stopped_rollout_service_is_replaced(impatient: EmbeddedCluster) -> None:
    wait_until(lambda: serves(impatient), "it does not start")
    first = process_of(impatient, "plexrl.rollout")
    # Until it serves it is not watched: a start has another limit.
    log = impatient.data_dir / "logs" / "up.log"
    running = f"rollout runs as process {first.pid}"
    wait_until(lambda: running in log.read_text(), "it does not serve")
    first.suspend()
    wait_until(lambda: not first.is_running(), "it is not replaced")
    second = process_of(impatient, "plexrl.rollout")
    assert second.pid != first.pid
    wait_until(lambda: serves(impatient), "its replacement does not start")
    assert second.is_running(), "the replacement has ended"
