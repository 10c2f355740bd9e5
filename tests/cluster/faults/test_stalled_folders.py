"""A file system that stalls is named; when it answers again, everything goes on."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from plexrl.process.folders.folder_watch import FOLDER_STALLED
from tests.cluster.tools import (
    DEADLINE_S,
    VOCABULARY,
    checkpoint_weights,
    train,
    wait_until,
    weights_after,
)
from tests.hosts.loop_disk import LoopDisk, why_no_loop_disk

MODEL = plexrl.tiny_qwen2(VOCABULARY)
STEPS = 4
DISK_BYTES = 256 << 20


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopDisk]:
    folder = tmp_path_factory.mktemp("stalled")
    if reason := why_no_loop_disk(tmp_path_factory.mktemp("loop")):
        pytest.skip(reason)
    made = LoopDisk(folder / "disk", folder / "image", DISK_BYTES)
    yield made
    made.unmount()


@pytest.fixture(scope="module")
def stalling(disk: LoopDisk) -> Iterator[EmbeddedCluster]:
    """A cluster whose data directory is on the disk."""
    running = start_embedded(disk.folder / "data", virtual_gpus=2)
    yield running
    running.close()


def condition_codes(cluster: plexrl.Cluster) -> set[str]:
    return {each["code"] for each in cluster.status()["conditions"]}


@pytest.mark.parametrize(
    "stalled_s", [pytest.param(0.0, id="until named"), pytest.param(20.0, marks=pytest.mark.slow)]
)
def test_training_goes_on_after_a_stall_of_the_data_directory(
    disk: LoopDisk, stalling: EmbeddedCluster, stalled_s: float
) -> None:
    undisturbed = weights_after(stalling, MODEL, STEPS)
    with (
        plexrl.connect(stalling.url, stalling.api_key) as cluster,
        cluster.create_job("stalled") as job,
        ThreadPoolExecutor(1) as controller,
    ):
        actor = job.train_deployment("actor", MODEL, workers=2)
        train(actor, 0).result()
        disk.freeze()
        try:
            thaw_at = time.monotonic() + stalled_s
            # Not even a submission is answered: nothing can be journalled.
            rest = controller.submit(lambda: [train(actor, step) for step in range(1, STEPS)])
            wait_until(lambda: FOLDER_STALLED in condition_codes(cluster), "it is not named")
            # The length of the stall is what is tested.
            time.sleep(max(0.0, thaw_at - time.monotonic()))
            assert not rest.done(), "something was acknowledged that is not on the disk"
        finally:
            disk.thaw()
        for future in rest.result(DEADLINE_S):
            future.result(DEADLINE_S)
        wait_until(lambda: not condition_codes(cluster), "it is named for ever")
        assert checkpoint_weights(actor) == undisturbed
        assert actor.status()["incarnation"] == 1, "workers were replaced"
