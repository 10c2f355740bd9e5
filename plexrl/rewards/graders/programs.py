"""Grades programs by test cases, in the sandbox, with a timeout for each test case."""

import hashlib
import logging
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from plexrl.errors import InvalidRequestError, StorageError
from plexrl.process.sandbox.limits import Ending, Program, ProgramRun
from plexrl.process.sandbox.sandbox import Sandbox
from plexrl.rewards.decisions.timeouts import AdaptiveTimeouts, TimeoutSettings
from plexrl.rewards.grade import PASSED, Grade, Outcome

LOG = logging.getLogger(__name__)

PYTHON = ("python3", "/program/main.py")
SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class ProgramTest:
    """An input, and the output of a correct program."""

    stdin: str
    expected: str
    """Standard output. Space at the ends of lines, and empty lines at the end, do not count."""

    @property
    def name(self) -> str:
        """The same for the same test case, also in another process."""
        return hashlib.sha256(f"{len(self.stdin)}:{self.stdin}{self.expected}".encode()).hexdigest()


class ProgramGrader:
    """Runs programs against their test cases.

    The slowest correct run of a test case bounds all later runs of it (Flexes §4.3). These times
    are kept in `times_file`, an SQLite file, if one is given.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        score: Literal["all", "share"] = "all",
        timeouts: TimeoutSettings | None = None,
        times_file: str | Path | None = None,
    ) -> None:
        """`score`: `all` gives 1 if all test cases pass, else 0, and ends at the first that does
        not pass. `share` gives the share of test cases that pass, and runs all of them: a program
        that never ends takes the timeouts of all test cases together, so `Graded` needs a
        `timeout_s` above their number times `timeouts.max_s`.

        Raises:
            StorageError: `times_file` cannot be used.
        """
        self._sandbox = sandbox
        self._score = score
        self._lock = threading.Lock()
        self._times = None if times_file is None else _Times(Path(times_file))
        known = {} if self._times is None else self._times.at_start
        self._timeouts = AdaptiveTimeouts(timeouts or TimeoutSettings(), known)

    def grade(
        self,
        source: str,
        tests: Sequence[ProgramTest],
        *,
        command: Sequence[str] = PYTHON,
        file: str = "main.py",
        files: Mapping[str, bytes] | None = None,
    ) -> Grade:
        """Run a program, by default in Python, against its test cases, one after another.

        Args:
            source: the program; it is `/program/FILE` in the sandbox.
            tests: at least one.
            command: starts the program.
            file: name of the program's file.
            files: other files in `/program`, by name.

        Raises:
            SandboxError: a run could not be started; nothing is known about the program.
        """
        if not tests:
            raise InvalidRequestError("a program needs at least one test case to be graded")
        content = {**(files or {}), file: source.encode(errors="replace")}
        passed, worst = 0, PASSED
        for index, test in enumerate(tests):
            found = self._case(tuple(command), content, test)
            passed += found.outcome is Outcome.PASSED
            if found.outcome is not Outcome.PASSED and worst is PASSED:
                detail = f"test case {index + 1} of {len(tests)}: {found.detail}"
                worst = Grade(score=0.0, outcome=found.outcome, detail=detail)
                if self._score == "all":
                    return worst
        return Grade(score=passed / len(tests), outcome=worst.outcome, detail=worst.detail)

    def timeout_s(self, test: ProgramTest) -> float:
        """How long a program may run for a test case now."""
        with self._lock:
            return self._timeouts.timeout_s(test.name)

    def _case(self, command: tuple[str, ...], files: dict[str, bytes], test: ProgramTest) -> Grade:
        program = Program(command=command, files=files, stdin=test.stdin.encode())
        timeout_s = self.timeout_s(test)
        run = self._sandbox.run(program, timeout_s=timeout_s)
        found = _judge(run, test, timeout_s)
        if found.outcome is Outcome.PASSED:
            with self._lock:
                is_slowest = self._timeouts.passed(test.name, run.wall_s)
            if is_slowest and self._times is not None:
                self._times.write(test.name, run.wall_s)
        return found

    def close(self) -> None:
        """Close the file of times. The sandbox stays open: the caller made it."""
        if self._times is not None:
            self._times.close()


class _Times:
    """The slowest correct run of each test case, in a file."""

    def __init__(self, path: Path) -> None:
        """Raises StorageError."""
        self._path = path
        self._lock = threading.Lock()
        try:
            self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        except sqlite3.Error as error:
            raise StorageError(f"cannot open the times of test cases, {path}: {error}") from error
        try:
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS slowest_correct_runs "
                "(test TEXT PRIMARY KEY, wall_s REAL)"
            )
            found = self._database.execute("SELECT test, wall_s FROM slowest_correct_runs")
            self.at_start: dict[str, float] = dict(found)
        except sqlite3.Error as error:
            self._database.close()
            raise StorageError(f"cannot read the times of test cases, {path}: {error}") from error

    def write(self, test: str, wall_s: float) -> None:
        """Without an error: the grade is known, and the time only makes later timeouts better."""
        try:
            # Another controller may use the file, too.
            with self._lock:
                self._database.execute(
                    "INSERT INTO slowest_correct_runs VALUES (?, ?) ON CONFLICT (test) "
                    "DO UPDATE SET wall_s = max(wall_s, excluded.wall_s)",
                    (test, wall_s),
                )
        except sqlite3.OperationalError as error:
            LOG.warning("a time of a test case was not kept in %s: %s", self._path, error)

    def close(self) -> None:
        self._database.close()


def _judge(run: ProgramRun, test: ProgramTest, timeout_s: float) -> Grade:
    match run.ending:
        case Ending.TIMED_OUT:
            outcome, detail = Outcome.TIMED_OUT, f"no end after {timeout_s:.1f} s"
        case Ending.KILLED:
            outcome, detail = Outcome.KILLED, f"killed by the limit {run.limit}"
        case Ending.EXITED if run.exit_code != 0:
            last = run.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            outcome = Outcome.WRONG
            detail = f"exit code {run.exit_code}: {last[:SHOWN_CHARACTERS]}"
        case Ending.EXITED if _lines(run.stdout.decode(errors="replace")) == _lines(test.expected):
            return PASSED
        case _:
            printed = run.stdout.decode(errors="replace")[:SHOWN_CHARACTERS]
            outcome = Outcome.WRONG
            detail = f"printed {printed!r} for {test.expected[:SHOWN_CHARACTERS]!r}"
    return Grade(score=0.0, outcome=outcome, detail=detail)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
