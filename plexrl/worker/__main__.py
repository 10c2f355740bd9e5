"""The node agent's process: `python -m plexrl.worker --config FILE`."""

import asyncio
import os
from functools import partial
from pathlib import Path

from plexrl.process.garbage_collection import rare_collections

with rare_collections():
    from plexrl.process.children.startup import print_ready, run_part
    from plexrl.worker.agent.agent import Agent
    from plexrl.worker.agent.launcher import LocalLauncher
    from plexrl.worker.interface.config import AgentConfig


async def serve(config: AgentConfig, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then end all workers."""
    # The fork server inherits these variables, and torch reads them when it is loaded.
    os.environ["OMP_NUM_THREADS"] = str(config.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    launcher = LocalLauncher(Path(config.run_dir))
    await Agent(config, launcher).run(stop, partial(print_ready, node=config.node))


def main() -> None:
    """Serve until a signal, then end all workers."""
    run_part("plexrl.worker", __doc__, AgentConfig, serve)


if __name__ == "__main__":
    main()
