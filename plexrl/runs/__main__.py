"""The service of controllers: `python -m plexrl.runs --config FILE`."""

import asyncio
import logging

from plexrl.process.garbage_collection import rare_collections

with rare_collections():
    from plexrl.process.children.startup import print_ready, run_part
    from plexrl.runs.service import RunsConfig, RunService


async def serve(config: RunsConfig, stop: asyncio.Event) -> None:
    """Run controllers until `stop` is set."""
    # It would log every request.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    service = RunService(config)
    print_ready(listen=[])
    await service.serve(stop)


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    run_part("plexrl.runs", __doc__, RunsConfig, serve)


if __name__ == "__main__":
    main()
