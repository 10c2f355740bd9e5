"""The device that a worker's process sees."""

import os

import pytest

from plexrl.worker.state.device import CPU, open_device


def test_a_worker_without_a_gpu_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert open_device("") is CPU
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
