"""The scheduler process: `python -m plexrl.scheduler --config FILE`.

If another scheduler leads on the same journal, this one stands by and takes over when the leader
ends. It reports that it is ready once it leads.
"""

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from plexrl.process.garbage_collection import rare_collections

with rare_collections():
    from plexrl.errors import LeaseLostError, PlexRLError
    from plexrl.process.children.startup import (
        load_config,
        print_ready,
        print_refused,
        raise_descriptor_limit,
        run_until_signal,
    )
    from plexrl.scheduler.rules.config import SchedulerConfig
    from plexrl.scheduler.service.journal.leadership import run_scheduler

LOG = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_LEASE_LOST = 75
"""`EX_TEMPFAIL`: start the process again, and it stands by."""


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m plexrl.scheduler", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    config = load_config(parser.parse_args().config, SchedulerConfig)

    raise_descriptor_limit()

    async def serve(stop: asyncio.Event) -> None:
        try:
            await run_scheduler(config, lambda found: print_ready(listen=found), stop)
        except LeaseLostError as error:
            LOG.critical("the scheduler stops: %s", error)
            # No cleanup: it would notify connections and wait for threads, and a scheduler that
            # lost its lease must not do anything.
            os._exit(EXIT_LEASE_LOST)

    try:
        run_until_signal(serve)
    except PlexRLError as error:
        LOG.critical("the scheduler cannot run: %s", error)
        print_refused(error)
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
