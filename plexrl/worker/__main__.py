"""The node agent's process: `python -m plexrl.worker --config FILE`."""

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

from plexrl.process.garbage_collection import rare_collections

with rare_collections():
    from plexrl.errors import PlexRLError
    from plexrl.process.children.startup import (
        load_config,
        print_ready,
        print_refused,
        run_until_signal,
    )
    from plexrl.worker.agent.agent import Agent
    from plexrl.worker.agent.launcher import LocalLauncher
    from plexrl.worker.interface.config import AgentConfig

LOG = logging.getLogger(__name__)

EXIT_FAILED = 1


def main() -> None:
    """Serve until a signal, then end all workers."""
    parser = argparse.ArgumentParser(prog="python -m plexrl.worker", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    config = load_config(parser.parse_args().config, AgentConfig)
    # The fork server inherits these variables, and torch reads them when it is loaded.
    os.environ["OMP_NUM_THREADS"] = str(config.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"

    async def serve(stop: asyncio.Event) -> None:
        connected = asyncio.Event()
        launcher = LocalLauncher(Path(config.run_dir))
        agent = asyncio.create_task(Agent(config, launcher).run(stop, connected))
        joined = asyncio.create_task(connected.wait())
        await asyncio.wait({agent, joined}, return_when=asyncio.FIRST_COMPLETED)
        if joined.done():
            print_ready(node=config.node)
        joined.cancel()
        await agent

    try:
        run_until_signal(serve)
    except PlexRLError as error:
        LOG.critical("the agent cannot run: %s", error)
        print_refused(error)
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
