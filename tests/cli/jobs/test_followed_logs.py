"""Followed logs show each new line once; the shell completes commands."""

import os
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from plexrl.cli.terminal.job_ids import new_lines


@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 40))
def test_each_line_is_shown_once_whatever_a_look_holds(known: int, more: int, most: int) -> None:
    log = [f"line {number}" for number in range(known + more)]
    before, now = log[:known][-most:], log[-most:]
    shown = list(new_lines(before, now))
    assert shown == log[known:][-most:]


def test_a_first_look_may_be_shorter_than_the_next_ones() -> None:
    log = [f"line {number}" for number in range(20)]
    assert list(new_lines(log[15:18], log)) == log[18:]


def test_a_log_that_began_anew_is_shown_from_its_start() -> None:
    assert list(new_lines(["old"], ["new", "newer"])) == ["new", "newer"]
    assert list(new_lines(["same"], [])) == []


def test_the_shell_completes_a_command() -> None:
    asked = {"_PLEXRL_COMPLETE": "complete_bash", "COMP_WORDS": "plexrl expl", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "from plexrl.cli.app import app; app(prog_name='plexrl')"],
        env={**os.environ, **asked},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["explain"]
