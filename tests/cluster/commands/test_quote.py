"""Quotes of a live cluster: by script, by job, by row; nothing changes, and kills do no harm."""

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

import plexrl
from plexrl.cluster.embedded.start import EmbeddedCluster
from plexrl.errors import ConflictError, InvalidRequestError, PlexRLError
from plexrl.wire.messages.overview_views import QuoteView
from tests.cluster.tools import process_of, wait_until

MODEL = plexrl.tiny_qwen2("0123456789", seed=1)
TRACE = plexrl.DemandTrace(4.0, [plexrl.Segment(0.0, 1.0)], 0.2)
SCRIPT = """
import plexrl

model = plexrl.tiny_qwen2("0123456789", seed=1)
with plexrl.connect() as cluster, cluster.create_job("scripted") as job:
    trace = plexrl.DemandTrace(4.0, [plexrl.Segment(0.0, 1.0)])
    actor = job.train_deployment("actor", model, workers=2, trace=trace)
    try:
        actor.publish().result()
    except Exception:
        pass
    print("the script went on")
"""


def quoted(cluster: plexrl.Cluster) -> QuoteView:
    """The quote of a dry run, once the tenant may ask again."""
    with cluster.create_job("dry", dry_run=True) as job:
        job.train_deployment("actor", MODEL, workers=2, trace=TRACE)
        return job.quote(steps=10, price=2.0)


def test_a_dry_run_takes_deployments_and_no_operation(cluster: plexrl.Cluster) -> None:
    before = [job["job"] for job in cluster.jobs()]
    with cluster.create_job("dry", dry_run=True) as job:
        with pytest.raises(InvalidRequestError, match="nothing was declared"):
            job.quote(steps=10)
        actor = job.train_deployment("actor", MODEL, workers=2, trace=TRACE)
        with pytest.raises(ConflictError, match="dry run"):
            actor.publish()
        found = job.quote(steps=10, price=2.0)["asked"]
    assert found["gpus"] == 2
    assert 40.0 <= found["end_s"] <= 80.0
    assert found["cost"] == 2.0 * found["gpu_hours"]
    assert [job["job"] for job in cluster.jobs()] == before


def test_a_submitted_job_has_no_quote_of_its_own(job: plexrl.Job) -> None:
    with pytest.raises(ConflictError, match="was submitted"):
        job.quote(steps=1)


def test_a_script_is_stopped_where_it_would_begin_to_work(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    before = [job["job"] for job in cluster.jobs()]
    access = {"PLEXRL_URL": embedded.url, "PLEXRL_API_KEY": embedded.api_key}
    command = [sys.executable, "-m", "plexrl", "quote", str(script), "--steps", "10", "--json"]
    ran = subprocess.run(
        command, env={**os.environ, **access}, capture_output=True, text=True, check=True
    )
    assert "went on" not in ran.stdout + ran.stderr
    assert json.loads(ran.stdout)["asked"]["gpus"] == 2
    assert [job["job"] for job in cluster.jobs()] == before


def test_a_bill_stands_beside_its_quote(cluster: plexrl.Cluster) -> None:
    quote = quoted(cluster)["asked"]
    with cluster.create_job("quoted", quote=quote) as job:
        job.train_deployment("actor", MODEL, pace="h800:qwen2.5-7b@0.01").barrier().result()
    [view] = [each for each in cluster.quoted() if each["job"] == job.job]
    assert view["quoted_end_s"] == quote["end_s"]
    assert view["end_s"] is not None
    [seen] = [each for each in cluster.jobs() if each["job"] == job.job]
    assert seen["quoted"] == view


@pytest.mark.parametrize("part", ["plexrl.scheduler", "plexrl.router"])
def test_a_kill_in_the_middle_of_a_quote_changes_nothing(
    embedded: EmbeddedCluster, cluster: plexrl.Cluster, part: str
) -> None:
    before = [job["job"] for job in cluster.jobs()]
    found: list[QuoteView | PlexRLError] = []

    def ask() -> None:
        try:
            found.append(quoted(cluster))
        except PlexRLError as error:
            found.append(error)

    asking = Thread(target=ask)
    asking.start()
    router = process_of(embedded, "plexrl.router")
    wait_until(lambda: bool(router.children()), "no child makes the quote")
    [child] = router.children()
    process_of(embedded, part).kill()
    asking.join(120.0)
    # The SDK asks again by itself while the cluster is away.
    [answer] = found
    assert isinstance(answer, dict) or answer.code in ("overloaded", "unavailable")
    assert [job["job"] for job in cluster.jobs()] == before
    wait_until(lambda: not child.is_running() or child.status() == "zombie", "the child goes on")
