"""Workers die with the fork server they come from, and with no other process."""

import os
import subprocess
import sys

from plexrl.cluster.lifeline import PARENT

TIED = "from plexrl.worker.launcher import tie_to_fork_server; tie_to_fork_server(); print('lives')"


def output_of(code: str, **environment: str) -> str:
    """What a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout.strip()


def test_a_fork_of_a_server_that_could_not_import_plexrl_lives() -> None:
    assert output_of(TIED, **{PARENT: "1"}) == "lives"


def test_the_fork_server_s_parent_is_not_that_of_what_its_forks_start() -> None:
    code = (
        "import os, plexrl.worker.fork_server_lifeline as lifeline; "
        f"print(lifeline.FORK_SERVER == os.getpid(), {PARENT!r} in os.environ)"
    )
    assert output_of(code, **{PARENT: str(os.getpid())}) == "True False"


def test_a_process_whose_fork_server_is_another_ends() -> None:
    code = (
        f"import plexrl.worker.fork_server_lifeline as lifeline; lifeline.FORK_SERVER = 1; {TIED}"
    )
    assert output_of(code) == ""
