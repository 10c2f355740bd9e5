"""A cluster that is started without options computes on the machine's GPU."""

from pathlib import Path

import pytest
import torch

import plexrl
from plexrl.cluster.embedded.start import start_embedded
from tests.cluster.tools import VOCABULARY, train
from tests.statemanager.device_rigs import real_driver

pytestmark = pytest.mark.gpu


def test_an_embedded_cluster_trains_on_the_machines_gpus(tmp_path: Path) -> None:
    real_driver()
    running = start_embedded(tmp_path, host_memory_bytes=1 << 30)
    try:
        assert running.gpus == f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        with (
            plexrl.connect(running.url, running.api_key) as cluster,
            cluster.create_job("real") as job,
        ):
            actor = job.train_deployment("actor", plexrl.tiny_qwen2(VOCABULARY, seed=4))
            train(actor, 0).result()
            (node,) = cluster.nodes()
            assert node["gpu_kind"] == torch.cuda.get_device_name(0)
    finally:
        running.close()
