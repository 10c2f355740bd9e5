"""The rollout service: `python -m plexrl.rollout --config FILE`."""

import argparse
import asyncio
import logging
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
    from plexrl.rollout.service.config import RolloutConfig
    from plexrl.rollout.service.server import RolloutService


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m plexrl.rollout", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)

    async def serve(stop: asyncio.Event) -> None:
        service = RolloutService(config)
        # It would log every request.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        servers = await service.open()
        async with asyncio.TaskGroup() as tasks:
            service.start(tasks)
            print_ready(listen=[str(each.address) for each in servers])
            await stop.wait()
            for server in servers:
                server.close()
            await service.close()

    try:
        config = load_config(parser.parse_args().config, RolloutConfig)
        run_until_signal(serve)
    except PlexRLError as error:
        print_refused(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
