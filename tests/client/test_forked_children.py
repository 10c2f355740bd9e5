"""A forked child leaves its parent's job alone, however it ends."""

import subprocess
import sys

import pytest

from tests.client.fake_router import FakeRouter

SCRIPT = """
import os, signal, sys
import plexrl

cluster = plexrl.connect(sys.argv[1], "key", timeout_s=5.0)
with cluster, cluster.create_job("j") as job, plexrl.Progress():
    child = os.fork()
    if child == 0:
        {ending}
    else:
        os.waitpid(child, 0)
        # The connection is still the parent's: its next request is answered.
        job.cancel("by the parent")
"""
ENDINGS = {
    "its end": "pass",
    "exit": "sys.exit()",
    "a status": "sys.exit(3)",
    "an error": "raise ValueError('of the child')",
    "Ctrl-C": "signal.raise_signal(signal.SIGINT)",
}


def run(script: str, router: FakeRouter) -> list[tuple[str, str]]:
    """What the script asks the cluster after it has created the job."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, router.url],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    created = router.requests.index(("POST", "/v1/jobs"))
    return router.requests[created + 1 :]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_child_that_leaves_the_block_does_not_touch_the_job(
    router: FakeRouter, ending: str
) -> None:
    assert run(SCRIPT.format(ending=ENDINGS[ending]), router) == [("POST", "/v1/jobs/j/finish")]
    assert router.bodies["/v1/jobs/j/finish"] == {
        "outcome": "cancelled",
        "reason": "by the parent",
    }


def test_a_child_does_not_ask_at_its_end_whether_the_job_goes_on(router: FakeRouter) -> None:
    script = SCRIPT.replace(
        'with cluster, cluster.create_job("j") as job, plexrl.Progress():',
        'job = cluster.create_job("j")\nif True:',
    )
    assert run(script.format(ending="pass"), router) == [("POST", "/v1/jobs/j/finish")]
