"""`make demo-hosts` finds both runs equal, on trainers that span two hosts."""

import json
import subprocess
import sys

import pytest

from tests.hosts.host import REPOSITORY


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("_namespaces")
def test_three_hosts_and_one_machine_agree_in_every_bit() -> None:
    command = [sys.executable, "-m", "scripts.demo_hosts", "--steps", "2", "--json"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["equal"]
    assert found["spans"]
    assert [len(run["rewards"]) for run in found["hosts"]] == [2, 2]
    assert all(run["hosts"] == ["node-a", "node-b"] for run in found["hosts"])
