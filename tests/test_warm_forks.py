"""A warm fork server works as one that was started anew, and ends with the process that has it."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.warm_forks import NAME

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets and namespaces of Linux")

AGENT = """
import multiprocessing, multiprocessing.forkserver, os, sys, time

def say(sender):
    torch = "torch" in sys.modules
    sender.send((os.getpid(), os.getppid(), torch, os.environ["WORD"], os.getcwd()))
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["plexrl.worker.agent.fork_server.lifeline", "plexrl.worker.agent.fork_server.preload"]
    )
    receiver, sender = context.Pipe(duplex=False)
    context.Process(target=say, args=(sender,), daemon=True).start()
    print(*receiver.recv(), multiprocessing.forkserver._forkserver._forkserver_pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("is_warm", "victim"), [(True, "agent"), (True, "fork server"), (False, "agent")]
)
def test_a_fork_server_has_torch_and_the_agents_environment_and_ends_with_it(
    tmp_path: Path, is_warm: bool, victim: str
) -> None:
    script = tmp_path / "agent.py"
    script.write_text(AGENT)
    paths = os.pathsep.join([os.environ["PYTHONPATH"], str(Path.cwd())])
    env = {**os.environ, "WORD": "agent's", "PYTHONPATH": paths}
    if not is_warm:
        del env[NAME]
    agent = subprocess.Popen(
        [sys.executable, str(script)],
        env=env,
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None
    worker, parent, torch, word, folder, known = agent.stdout.readline().split()
    assert (torch, word, folder) == ("True", "agent's", str(tmp_path))
    assert (parent != known) == is_warm
    processes = [psutil.Process(int(pid)) for pid in {parent, known}]
    # Workers die with the server by their own doing, and this one is none.
    psutil.Process(int(worker)).kill()
    if victim == "agent":
        agent.kill()
    else:
        psutil.Process(int(known)).kill()
    agent.communicate("")
    assert psutil.wait_procs(processes, timeout=30)[1] == []
