"""The service of controllers: `python -m plexrl.runs --config FILE`."""

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from plexrl.errors import PlexRLError
from plexrl.process.children.startup import (
    load_config,
    print_ready,
    print_refused,
    run_until_signal,
)
from plexrl.runs.service import RunsConfig, RunService


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="python -m plexrl.runs", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)

    async def serve(stop: asyncio.Event) -> None:
        logging.getLogger("httpx").setLevel(logging.WARNING)
        service = RunService(config)
        print_ready(listen=[])
        await service.serve(stop)

    try:
        config = load_config(parser.parse_args().config, RunsConfig)
        run_until_signal(serve)
    except PlexRLError as error:
        print_refused(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
