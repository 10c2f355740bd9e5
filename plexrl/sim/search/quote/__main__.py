"""The process that computes one quote: `python -m plexrl.sim.search.quote`.

It reads a `QuoteTask` as JSON from standard input, and writes the quote, or {"error": ...}, to
standard output. It limits its own processor time and memory, and ends with its parent.
"""

import os
import resource
import sys

import msgspec

from plexrl.errors import OverloadedError, PlexRLError
from plexrl.process.children.lifeline import die_with_named_parent
from plexrl.scheduler.queries.overview.planned_jobs import ClusterPlan
from plexrl.sim.search.quote.quote import quote

CPU_S_MAX = 120
MEMORY_MAX = 2 << 30
NICENESS = 10
"""Parts of the cluster on the same machine go first."""


class QuoteTask(msgspec.Struct, frozen=True, kw_only=True):
    """What to compute."""

    plan: ClusterPlan
    price: float | None = None


def main() -> None:
    """Compute one quote."""
    die_with_named_parent(os.environ)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S_MAX, CPU_S_MAX))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_MAX, MEMORY_MAX))
    os.nice(NICENESS)
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=QuoteTask)
    try:
        answer: object = quote(task.plan, price=task.price)
    except PlexRLError as error:
        answer = {"error": error.to_wire()}
    except MemoryError:
        full = OverloadedError(
            "this cluster has more work than a quote may simulate: ask when there is less",
            retry_after_s=60.0,
        )
        answer = {"error": full.to_wire()}
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
