"""Grades mathematical answers with `math-verify`, in the sandbox.

`math-verify` reads an answer with SymPy, where a few characters can cost minutes or gigabytes, and
it cannot be interrupted in a thread. So it runs in processes of the sandbox.
"""

import json
import secrets
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from plexrl.errors import DeadlineExceededError, InvalidRequestError, SandboxError
from plexrl.limits import check_numbers
from plexrl.process.sandbox.limits import MIB, Limits, Program
from plexrl.process.sandbox.sandbox import Sandbox
from plexrl.rewards.grade import PASSED, Grade, wrong
from plexrl.rewards.graders import math_worker

if TYPE_CHECKING:
    from plexrl.process.sandbox.session import Session

WORKER_CPU_S = 10 * 365 * 24 * 3600
"""A process answers many requests, each of which has bounds of its own."""
LIMITS = Limits(memory_bytes=1024 * MIB)
ANSWER_S = 120.0
"""Wall time of an answer, including the import of SymPy by a new process on a busy machine."""
ANSWER_CHARACTERS_MAX = 1 << 20


class MathGrader:
    """Compares answers such as `\\boxed{\\frac12}` and `0.5` by their mathematical meaning.

    Several threads may use it. Its processes start when they are needed first, in about a second.
    """

    def __init__(
        self, *, at_once: int | None = None, timeout_s: float = 2.0, limits: Limits = LIMITS
    ) -> None:
        """Args:
            at_once: comparisons at the same time; default: the number of this process' CPUs.
            timeout_s: CPU seconds of a comparison (Flexes §5: 2).
            limits: of one of the processes. `cpu_s` has no effect: `timeout_s` bounds comparisons.

        Raises:
            SandboxError: `math-verify` is not installed, or there is no sandbox.
        """
        check_numbers("sandbox", {"at_once": at_once, "timeout_s": timeout_s})
        spec = find_spec("math_verify")
        if spec is None or spec.origin is None:
            raise SandboxError("math-verify is not installed: pip install 'plexrl[rewards]'")
        packages = Path(spec.origin).parent.parent
        self._timeout_s = timeout_s
        limits = replace(limits, cpu_s=WORKER_CPU_S)
        self._sandbox = Sandbox(limits=limits, at_once=at_once, folders=[packages])
        self._program = Program(
            command=(f"{sys.base_prefix}/bin/python3", "-I", "/program/worker.py", str(packages)),
            files={"worker.py": Path(math_worker.__file__).read_bytes()},
        )
        self._free = threading.Semaphore(self._sandbox.at_once)
        self._idle: list[Session] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def grade(self, answer: str, expected: str) -> Grade:
        """Passed if `answer`, which may be a whole response, ends with what equals `expected`.

        `expected` is LaTeX, such as `\\frac{1}{2}`; plain numbers are, too.

        Raises:
            InvalidRequestError: `expected` is no mathematical expression.
            DeadlineExceededError: the comparison took too long.
            SandboxError: the comparison failed, for example for lack of memory.
        """
        if len(answer) > ANSWER_CHARACTERS_MAX:
            return wrong(f"the answer has more than {ANSWER_CHARACTERS_MAX} characters")
        found = self._ask({"answer": answer, "expected": expected, "timeout_s": self._timeout_s})
        if "invalid" in found:
            raise InvalidRequestError(str(found["invalid"]))
        if "late" in found:
            raise DeadlineExceededError(
                f"the comparison with {expected[:100]!r} took more than {self._timeout_s:g} s of "
                "CPU time"
            )
        if "failure" in found:
            raise SandboxError(f"math-verify failed: {found['failure']}")
        return PASSED if found["difference"] is None else wrong(str(found["difference"]))

    def _ask(self, request: dict[str, object]) -> dict[str, Any]:
        """The answer of a process; one that fails to answer is ended."""
        # An answer that takes over the process can answer for itself, but for no later request.
        request["id"] = secrets.token_hex(16)
        with self._free:
            with self._lock:
                if self._is_closed:
                    raise SandboxError("the grader is closed")
                session = self._idle.pop() if self._idle else None
            if session is None:
                session = self._sandbox.open_session(self._program)
            with ExitStack() as stack:
                stack.callback(session.close)
                found = _answer(session, request)
                with self._lock:
                    if not self._is_closed:
                        stack.pop_all()
                        self._idle.append(session)
        return found

    def close(self) -> None:
        """End the processes. Comparisons that run, and later ones, fail with `SandboxError`."""
        with self._lock:
            self._is_closed = True
            sessions, self._idle = self._idle, []
        for session in sessions:
            session.close()
        self._sandbox.close()


def _answer(session: "Session", request: dict[str, object]) -> dict[str, Any]:
    try:
        line = session.ask(json.dumps(request).encode(), ANSWER_S)
    except TimeoutError as error:
        raise SandboxError(f"math-verify gave no answer: {error}") from error
    found: dict[str, Any] = json.loads(line)
    if found.get("id") != request["id"]:
        raise SandboxError("math-verify answered something else than what was asked")
    return found
