"""A damaged or lost newest version of the state costs time and changes no weights."""

import shutil
import signal
from pathlib import Path
from urllib.parse import quote

import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster, start_embedded
from plexrl.process.folders.folders import Folders
from tests.cluster.tools import (
    VOCABULARY,
    checkpoint_weights,
    process_of,
    train,
    wait_until,
    weights_after,
)

STEPS = 6
DAMAGED_AT = 4
MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=3)
STATE_MANAGER = "plexrl.statemanager"


def offload(actor: plexrl.TrainDeployment, other: plexrl.TrainDeployment) -> None:
    """Make the group switch to `other`."""
    other.barrier().result(120)
    wait_until(lambda: actor.status()["residency"] == "offloaded", "it was not offloaded")


def damage_newest_on_nvme(cluster: EmbeddedCluster, actor: plexrl.TrainDeployment) -> None:
    """Flip a bit in the middle of each rank's newest version."""
    nvme = cluster.data_dir / "nodes" / "node0" / "nvme"
    name = quote(actor.deployment, safe="")
    wait_until(lambda: actor.status()["nvme_bytes"] > 0, "its state is not shown on NVMe")
    seq = actor.status()["durable_seq"]
    daemon = process_of(cluster, STATE_MANAGER)
    daemon.suspend()
    for rank in range(2):
        damaged = list(nvme.glob(f"{name}.{rank}.state.{seq}.*.object"))
        assert damaged, f"version {seq} of rank {rank} is not on NVMe"
        for path in damaged:
            contents = bytearray(path.read_bytes())
            contents[len(contents) // 2] ^= 1
            path.write_bytes(contents)
    daemon.resume()


def lose_host_tier(cluster: EmbeddedCluster, actor: plexrl.TrainDeployment) -> None:
    """Kill the daemon and delete its memory files."""
    del actor
    daemon = process_of(cluster, STATE_MANAGER)
    daemon.suspend()
    tier = Folders.of(cluster.data_dir).shared_memory / "node0"
    for path in list(tier.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    daemon.send_signal(signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(embedded: EmbeddedCluster) -> bytes:
    return weights_after(embedded, MODEL, STEPS)


# `tests/statemanager/store/test_tier_faults.py` damages a version, and
# `tests/scheduler/recovery/test_rebuilding.py` computes a lost one again.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("hurt", "host_memory_bytes"),
    [(damage_newest_on_nvme, 64 << 10), (lose_host_tier, 64 << 20)],
)
def test_a_damaged_newest_version_is_recomputed_bit_for_bit(
    tmp_path: Path, undisturbed: bytes, hurt: object, host_memory_bytes: int
) -> None:
    assert callable(hurt)
    running = start_embedded(tmp_path, virtual_gpus=2, host_memory_bytes=host_memory_bytes)
    try:
        with (
            plexrl.connect(running.url, running.api_key) as cluster,
            cluster.create_job("victim") as job,
            cluster.create_job("bystander") as second,
        ):
            actor = job.train_deployment("actor", MODEL, workers=2)
            other = second.train_deployment("actor", MODEL, workers=2)
            for index in range(STEPS):
                if index == DAMAGED_AT:
                    offload(actor, other)
                    hurt(running, actor)
                train(actor, index)
                actor.barrier().result(120)
                offload(actor, other)
            weights = checkpoint_weights(actor)
            (row,) = [each for each in cluster.jobs() if each["job"] == job.job]
            assert actor.status()["incarnation"] > 1, "nothing was damaged"
            assert row["state"] != "FAILED"
    finally:
        running.close()
    assert weights == undisturbed
