"""An operation whose workers hang is named, its workers are replaced, and no step is lost."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest

import plexrl
from plexrl.process.conditions import ConditionView
from tests.cluster.join.machines import Running
from tests.cluster.tools import (
    VOCABULARY,
    checkpoint_weights,
    has_ended,
    rank_process,
    train,
    wait_until,
)

MODEL = plexrl.tiny_qwen2(VOCABULARY)
STEPS = 4
OVERDUE_S = 5.0
CODE = "operation_overdue"
CONFIG = f"""
[cluster]
part_stuck_s = 0

[scheduler]
operation_overdue_s = {OVERDUE_S}
"""
"""A silent worker is not replaced for its silence: only the bound of its operation acts."""


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A cluster whose operations have short bounds."""
    folder = tmp_path_factory.mktemp("strict")
    config = folder / "cluster.toml"
    config.write_text(CONFIG)
    words = ("up", "--config", str(config), "--virtual-gpus", "2", "--policy", "pack")
    running = Running(folder / "data", *words, "--port", "0")
    try:
        yield running.ready()
    finally:
        running.end()


@pytest.fixture(scope="module")
def undisturbed(strict: dict[str, Any]) -> bytes:
    with (
        plexrl.connect(strict["url"], strict["api_key"]) as cluster,
        cluster.create_job("undisturbed") as job,
    ):
        actor = job.train_deployment("actor", MODEL, workers=2)
        for step in range(STEPS):
            train(actor, step).result()
        return checkpoint_weights(actor)


@pytest.mark.parametrize(
    "stopped_ranks",
    [
        pytest.param((1,), id="a collective hangs"),
        pytest.param((0, 1), id="both", marks=pytest.mark.slow),
    ],
)
def test_an_overdue_operation_is_named_and_its_workers_replaced(
    strict: dict[str, Any], undisturbed: bytes, stopped_ranks: tuple[int, ...]
) -> None:
    url, key = strict["url"], strict["api_key"]
    with (
        plexrl.connect(url, key) as cluster,
        cluster.create_job("hung") as job,
        ThreadPoolExecutor(1) as controller,
    ):
        actor = job.train_deployment("actor", MODEL, workers=2)
        # The bound of a kind that has run is shorter.
        train(actor, 0).result()
        stopped = [rank_process(actor, rank) for rank in stopped_ranks]
        for process in stopped:
            process.suspend()
        try:
            futures = [train(actor, step) for step in range(1, STEPS)]
            overdue = futures[0].operation
            wait_until(lambda: bool(_conditions(cluster)), "no condition names it")
            (condition,) = _conditions(cluster)
            assert actor.deployment in condition["message"]
            assert "was expected to end" in condition["message"]
            health = httpx.get(f"{url}/v1/health").json()
            assert CODE in {each["code"] for each in health["conditions"]}
            metrics = httpx.get(f"{url}/v1/metrics").text
            assert f'plexrl_condition_seconds{{code="{CODE}"' in metrics
            assert "overdue for" in json.dumps(job.explain())
            rest = controller.submit(lambda: [future.result() for future in futures])
            wait_until(
                lambda: not any(not has_ended(process) for process in stopped),
                "they were not replaced",
            )
            rest.result()
        finally:
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.resume()
        wait_until(lambda: not _conditions(cluster), f"{overdue} is overdue for ever")
        assert checkpoint_weights(actor) == undisturbed
        assert actor.status()["incarnation"] == 2


def _conditions(cluster: plexrl.Cluster) -> list[ConditionView]:
    return [each for each in cluster.status()["conditions"] if each["code"] == CODE]
