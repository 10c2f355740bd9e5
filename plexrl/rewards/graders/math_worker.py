"""Compares mathematical answers, in the sandbox: reads requests, a line each, and writes answers.

Its arguments are the folders to import from. Each request is answered by a process of its own, so
an answer that takes too long, or too much memory, ends only that process.
"""

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any


def main() -> None:
    """Answer the requests on the standard input."""
    sys.path[:0] = sys.argv[1:]
    output = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # What the first comparison loads is then there in each process.
    compare("$\\frac{1}{2}$", "0.5")
    for line in sys.stdin:
        if line.strip():
            request = json.loads(line)
            found = {**answer_request(request), "id": request["id"]}
            os.write(output, json.dumps(found).encode() + b"\n")


def answer_request(request: dict[str, Any]) -> dict[str, Any]:
    """The answer of a process that is started for the request."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        # CPU time: a busy machine makes no answer harder. The signal ends the process.
        signal.setitimer(signal.ITIMER_PROF, request["timeout_s"])
        try:
            found = compare(request["answer"], request["expected"])
        except Exception as error:
            # Of any kind: it is reported, and the controller decides what it means.
            found = {"failure": f"{type(error).__name__}: {error}"[:1000]}
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    reply = os.read(reader, 1 << 15)
    os.close(reader)
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        # What the process may have left behind.
        os.kill(-1, signal.SIGKILL)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        key = "late" if number == signal.SIGPROF else "failure"
        return {key: f"the comparison was ended by signal {number}"}
    decoded: dict[str, Any] = json.loads(reply or b'{"failure": "no reply"}')
    return decoded


def compare(answer: str, expected: str) -> dict[str, Any]:
    """Whether the two are mathematically equal."""
    from math_verify import parse, verify

    is_marked = any(mark in expected for mark in ("$", "\\boxed", "\\[", "\\("))
    wanted = parse(expected if is_marked else f"${expected}$", parsing_timeout=None)
    if not wanted:
        return {"invalid": f"expected {expected[:200]!r} is no mathematical expression"}
    found = parse(answer, parsing_timeout=None)
    if not found:
        return {"difference": "the answer has no mathematical expression"}
    if verify(wanted, found, timeout_seconds=None):
        return {"difference": None}
    return {"difference": f"{str(found[0])[:100]} is not {str(wanted[0])[:100]}"}


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
