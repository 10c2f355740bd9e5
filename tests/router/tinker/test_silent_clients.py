"""A client that falls silent keeps no GPUs."""

import time

import httpx
import pytest

import plexrl
from plexrl.cli.terminal.job_ids import find_job
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.router.tinker.sessions import REATTACH_S, SILENCE_S
from tests.cluster.tools import wait_until
from tests.router.tinker.clients import LIMIT_S, Tenant

pytestmark = pytest.mark.slow
MARGIN_S = 30.0
"""For the machine, which others use too."""


def make_model(http: httpx.Client) -> str:
    """A session with a model; the client sends nothing after that."""
    session = str(http.post("/create_session", json={}).json()["session_id"])
    asked = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
    future = http.post("/create_model", json={**asked, "lora_config": {"rank": 4}}).json()
    name = {"request_id": future["request_id"]}

    def is_made() -> bool:
        return "model_id" in http.post("/retrieve_future", json=name).json()

    wait_until(is_made, "the model was not made", LIMIT_S)
    return session


def test_gpus_of_a_client_without_heartbeats_are_released_within_the_stated_time(
    cluster: EmbeddedCluster, tenant: Tenant
) -> None:
    with tenant.http() as http, plexrl.connect(cluster.url, cluster.api_key) as operator:
        session = make_model(http)
        silent_at = time.monotonic()
        job = find_job(operator, session)
        assert any(each["group"] for each in job.status()["deployments"])
        limit_s = SILENCE_S + REATTACH_S + MARGIN_S
        wait_until(lambda: job.status()["state"] == "CANCELLED", "it was not cancelled", limit_s)
        # Not before its client had the time to come back.
        assert time.monotonic() - silent_at > SILENCE_S
        wait_until(
            lambda: not any(each["group"] for each in job.status()["deployments"]),
            "it still has GPUs",
        )
        beat = http.post("/session_heartbeat", json={"session_id": session})
        assert beat.status_code == 410
