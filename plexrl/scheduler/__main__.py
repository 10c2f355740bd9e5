"""The scheduler process: `python -m plexrl.scheduler --config FILE`."""

import argparse
import asyncio
from pathlib import Path

from plexrl.cluster.process import load_config, print_ready, run_until_signal
from plexrl.scheduler.config import SchedulerConfig
from plexrl.scheduler.service import Service


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m plexrl.scheduler", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    config = load_config(parser.parse_args().config, SchedulerConfig)
    service = Service(config)

    async def serve(stop: asyncio.Event) -> None:
        await service.run(lambda: print_ready(listen=config.listen), stop)

    run_until_signal(serve)


if __name__ == "__main__":
    main()
