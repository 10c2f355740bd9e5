"""The rollout service: `python -m plexrl.rollout --config FILE`."""

import asyncio
import logging

from plexrl.process.garbage_collection import rare_collections

with rare_collections():
    from plexrl.process.children.startup import print_ready, run_part
    from plexrl.rollout.service.config import RolloutConfig
    from plexrl.rollout.service.server import RolloutService


async def serve(config: RolloutConfig, stop: asyncio.Event) -> None:
    """Coordinate rollouts until `stop` is set."""
    service = RolloutService(config)
    # It would log every request.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    servers = await service.open()
    async with asyncio.TaskGroup() as tasks:
        service.start(tasks)
        print_ready(listen=[str(server.address) for server in servers])
        await stop.wait()
        for server in servers:
            server.close()
        await service.close()


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    run_part("plexrl.rollout", __doc__, RolloutConfig, serve)


if __name__ == "__main__":
    main()
