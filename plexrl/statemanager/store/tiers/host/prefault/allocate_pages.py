"""A process that allocates pages of files when the machine's cores have nothing else to do.

A script of its own, because only a process can have idle priority without harm: a thread of a
Python process would make the other threads wait for the interpreter lock that it holds.

It reads lines with a JSON array, `[path, offset, bytes]`, and answers each with 0 or the number of
the system's error. It ends with its standard input.
"""

import json
import os
import sys
from contextlib import suppress


def main() -> None:
    """Serve until the end of the input."""
    os.nice(19)
    # Not every sandbox allows it.
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    for line in sys.stdin:
        path, offset, nbytes = json.loads(line)
        code = 0
        try:
            with open(path, "r+b") as file:  # noqa: PTH123
                os.posix_fallocate(file.fileno(), offset, nbytes)
        except OSError as error:
            code = error.errno or 5
        sys.stdout.write(f"{code}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
