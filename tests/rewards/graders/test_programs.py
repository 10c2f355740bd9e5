"""Programs with test cases, run in the sandbox."""

import sqlite3
from pathlib import Path

import pytest

from plexrl.errors import InvalidRequestError, SandboxError, StorageError
from plexrl.process.sandbox.sandbox import Sandbox
from plexrl.rewards.decisions.timeouts import TimeoutSettings
from plexrl.rewards.grade import Outcome
from plexrl.rewards.graders.programs import ProgramGrader, ProgramTest

DOUBLE = "print(int(input()) * 2)"
TESTS = [ProgramTest("1\n", "2"), ProgramTest("5\n", "10\n"), ProgramTest("-3", "-6 \n\n")]


@pytest.mark.parametrize(
    ("source", "outcome", "detail"),
    [
        (DOUBLE, Outcome.PASSED, ""),
        ("print(2)", Outcome.WRONG, "test case 2 of 3: printed '2\\n' for '10\\n'"),
        ("print(int(input()) + y)", Outcome.WRONG, "exit code 1: NameError: name 'y'"),
        ("import sys; sys.exit(127)", Outcome.WRONG, "exit code 127"),
        ("print('x' * (1 << 30))", Outcome.WRONG, "MemoryError"),
        ("while True: print('x' * 65536)", Outcome.KILLED, "killed by the limit output"),
        ("", Outcome.WRONG, "printed '' for '2'"),
        ("\ud800", Outcome.WRONG, "exit code 1"),
    ],
)
def test_outcome_says_what_happened(
    sandbox: Sandbox, source: str, outcome: Outcome, detail: str
) -> None:
    found = ProgramGrader(sandbox).grade(source, TESTS)
    assert found.outcome is outcome
    assert detail in found.detail
    assert found.score == (outcome is Outcome.PASSED)


def test_share_of_test_cases_is_the_score(sandbox: Sandbox) -> None:
    found = ProgramGrader(sandbox, score="share").grade("print(abs(int(input()) * 2))", TESTS)
    assert found.score == pytest.approx(2 / 3)
    assert found.outcome is Outcome.WRONG
    assert found.detail.startswith("test case 3 of 3")


def test_slowest_correct_run_bounds_later_runs(sandbox: Sandbox, tmp_path: Path) -> None:
    settings = TimeoutSettings(factor=2.0, min_s=0.5, max_s=60.0)
    file = tmp_path / "times.sqlite"
    grader = ProgramGrader(sandbox, timeouts=settings, times_file=file)
    assert grader.timeout_s(TESTS[0]) == 60.0
    grader.grade("import time; time.sleep(0.3); print(3)", TESTS[:1])
    assert grader.timeout_s(TESTS[0]) == 60.0
    assert grader.grade("import time; time.sleep(0.3); print(2)", TESTS[:1]).score == 1.0
    bound_s = grader.timeout_s(TESTS[0])
    assert 0.6 <= bound_s < 60.0
    found = grader.grade("import time; time.sleep(1e6)", TESTS[:1])
    assert found.outcome is Outcome.TIMED_OUT
    assert grader.timeout_s(TESTS[0]) == bound_s
    assert grader.timeout_s(TESTS[1]) == 60.0
    grader.close()
    again = ProgramGrader(sandbox, timeouts=settings, times_file=file)
    assert again.timeout_s(TESTS[0]) == bound_s
    again.close()


def test_file_of_times_that_is_locked_fails_no_program(
    sandbox: Sandbox, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "times.sqlite"
    grader = ProgramGrader(sandbox, times_file=file)
    assert grader._times is not None
    grader._times._database.execute("PRAGMA busy_timeout = 100")
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert grader.grade(DOUBLE, TESTS[:1]).score == 1.0
    assert "a time of a test case was not kept" in caplog.text
    other.close()
    grader.close()


@pytest.mark.parametrize("content", [b"no database" * 100, None])
def test_file_of_times_that_cannot_be_used_is_named(
    sandbox: Sandbox, tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "times.sqlite"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    with pytest.raises(StorageError, match=r"times of test cases, .*times\.sqlite"):
        ProgramGrader(sandbox, times_file=file)


def test_program_in_another_language(sandbox: Sandbox) -> None:
    found = ProgramGrader(sandbox).grade(
        "read n\necho $((n * 2))\n",
        [ProgramTest("21\n", "42")],
        command=("sh", "/program/run.sh"),
        file="run.sh",
    )
    assert found.outcome is Outcome.PASSED


def test_missing_program_is_a_fault_of_the_grader(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="no program 'no-such-language'"):
        ProgramGrader(sandbox).grade("x", TESTS, command=("no-such-language", "/program/main.py"))


def test_program_without_test_cases_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidRequestError, match="at least one test case"):
        ProgramGrader(sandbox).grade(DOUBLE, [])
