"""Rows of one generation: read one by one as they end, stopped one by one, on several replicas."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest

import plexrl
from plexrl.client.calls import requests
from plexrl.cluster.embedded.start import EmbeddedCluster
from tests.cluster.tools import VOCABULARY, kill_worker, wait_until

MODEL = plexrl.tiny_qwen2(VOCABULARY, seed=5)
PROMPTS = [[3, 4], [5], [6, 7, 8], [9], [3, 9], [4]]
LENGTHS = [20, 5, 150, 7, 150, 9]
NUMBERS = [40, 7, 0, 3, 2, 11]
FREE = (0, 1, 3, 5)
"""Rows that nobody stops."""


@pytest.fixture
def http(embedded: EmbeddedCluster) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {embedded.api_key}"}
    with httpx.Client(base_url=embedded.url, headers=headers, timeout=60) as client:
        yield client


@pytest.fixture
def rollout(job: plexrl.Job) -> plexrl.RolloutDeployment:
    return job.rollout_deployment("rollout", MODEL, parallelism=plexrl.Parallelism(dp=2))


def job_of(rollout: plexrl.RolloutDeployment) -> str:
    return rollout.deployment.rpartition("/")[0]


class Rows:
    """One generation with a row for each prompt."""

    def __init__(self, http: httpx.Client, rollout: plexrl.RolloutDeployment, name: str) -> None:
        settings = {"max_tokens": LENGTHS, "first_sample": NUMBERS}
        call = requests.generate(
            rollout.deployment,
            PROMPTS,
            1,
            plexrl.SamplingParams(seed=3, ignore_eos=True),
            stream="rows",
            settings={name: np.array(each, dtype=np.int64) for name, each in settings.items()},
        ).call
        self._http = http
        self.operation = f"{job_of(rollout)}:{name}"
        self._path = f"/v1/operations/{quote(self.operation, safe='')}"
        http.post(
            call.path,
            params={"operation": self.operation},
            content=call.content,
            headers={"content-type": call.content_type or ""},
        ).raise_for_status()

    def stop(self, rows: list[int]) -> httpx.Response:
        return self._http.post(f"{self._path}/stop-rows", json={"rows": rows})

    def read(self, after: str = "") -> dict[int, Any]:
        """The rows of the stream, by number. A row comes once, unless there was a restart."""
        found: dict[int, Any] = {}
        with self._http.stream("GET", f"{self._path}/stream", params={"after": after}) as response:
            for line in response.iter_lines():
                event = json.loads(line)
                if "restart" in event:
                    found.clear()
                for row in event.get("rows", ()):
                    assert row["sample"] not in found
                    found[row["sample"]] = row
        assert "done" in event
        return found


def test_rows_end_one_by_one_and_stopped_ones_stay_stopped(
    http: httpx.Client, rollout: plexrl.RolloutDeployment
) -> None:
    rollout.barrier().result(120)
    rollout.pause()
    made = Rows(http, rollout, "one")
    load = f"/v1/jobs/{job_of(rollout)}/deployments/rollout/engines"

    def unfinished() -> list[list[Any]]:
        engines = http.get(load).json()["engines"]
        return sorted(row for engine in engines for row in engine["rows"])

    wait_until(lambda: len(unfinished()) == 6, "the generation does not begin")
    assert [row[:3] for row in unfinished()] == [
        [made.operation, row, len(prompt)] for row, prompt in enumerate(PROMPTS)
    ]
    for _ in range(2):
        assert made.stop([2, 4]).json()["state"] == "running"
    wait_until(lambda: len(unfinished()) == 4, "the rows are not stopped")
    rollout.resume()
    rows = made.read()
    for row in range(6):
        is_free = row in FREE
        assert rows[row]["finish_reason"] == ("length" if is_free else "abort")
        assert len(rows[row]["tokens"]) == (LENGTHS[row] if is_free else 0)
        assert rows[row]["weights"] == [[0, 0, 0]]
    assert made.read() == rows, "from the result, once more"
    assert made.stop([0]).json()["state"] == "finished"

    # The workers are lost while the next one is held, with a row that was stopped before.
    rollout.pause()
    again = Rows(http, rollout, "two")
    wait_until(lambda: len(unfinished()) == 6, "the generation does not begin")
    again.stop([4])
    kill_worker(rollout, 1)
    repeated = again.read()
    assert rollout.status()["incarnation"] == 2
    assert repeated[4]["tokens"] == []
    assert len(repeated[2]["tokens"]) == LENGTHS[2]
    for row in FREE:
        assert repeated[row]["tokens"] == rows[row]["tokens"]


def test_what_cannot_be_is_refused(http: httpx.Client, rollout: plexrl.RolloutDeployment) -> None:
    made = Rows(http, rollout, "one")
    for rows in ([], [-1], ["0"], [1 << 20]):
        assert made.stop(rows).status_code == 400  # type: ignore[arg-type]
    path = quote(rollout.barrier().operation, safe="")
    refused = http.post(f"/v1/operations/{path}/stop-rows", json={"rows": [0]})
    assert refused.status_code == 409
    assert "only a generate has rows" in refused.json()["error"]["message"]
    assert http.post("/v1/operations/none/stop-rows", json={"rows": [0]}).status_code == 404
