"""The scheduler process: `python -m plexrl.scheduler --config FILE`.

If another scheduler leads on the same journal, this one stands by and takes over when the leader
ends. It reports that it is ready once it leads.
"""

import asyncio
import logging
import os

from plexrl.process.garbage_collection import rare_collections

with rare_collections():
    from plexrl.errors import LeaseLostError
    from plexrl.process.children.startup import print_ready, raise_descriptor_limit, run_part
    from plexrl.scheduler.rules.config import SchedulerConfig
    from plexrl.scheduler.service.journal.leadership import run_scheduler

LOG = logging.getLogger(__name__)

EXIT_LEASE_LOST = 75
"""`EX_TEMPFAIL`: start the process again, and it stands by."""


async def serve(config: SchedulerConfig, stop: asyncio.Event) -> None:
    """Lead or stand by until `stop` is set."""
    raise_descriptor_limit()
    try:
        await run_scheduler(config, lambda listen: print_ready(listen=listen), stop)
    except LeaseLostError as error:
        LOG.critical("the scheduler stops: %s", error)
        # No cleanup: it would notify connections and wait for threads, and a scheduler that lost
        # its lease must not do anything.
        os._exit(EXIT_LEASE_LOST)


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    run_part("plexrl.scheduler", __doc__, SchedulerConfig, serve)


if __name__ == "__main__":
    main()
