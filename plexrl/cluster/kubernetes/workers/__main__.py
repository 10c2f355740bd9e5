"""An agent whose workers are pods: `python -m plexrl.cluster.kubernetes.workers --config FILE`.

The file holds the agent's configuration as `agent`, and that of the pods as `pods`.
"""

import argparse
import asyncio
import json
from functools import partial
from pathlib import Path

from plexrl.process.garbage_collection import rare_collections

with rare_collections():
    from plexrl.cluster.kubernetes.api import connect
    from plexrl.cluster.kubernetes.workers.launcher import PodLauncher
    from plexrl.cluster.kubernetes.workers.pods import PodsConfig
    from plexrl.process.children.startup import parse_config, print_ready, run_until_signal
    from plexrl.worker.agent.agent import Agent
    from plexrl.worker.interface.config import AgentConfig


def main() -> None:
    """Serve until a signal, then end all workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    path = parser.parse_args().config
    given = json.loads(path.read_text())
    config = parse_config(json.dumps(given.get("agent")), AgentConfig, f"agent of {path}")
    pods = parse_config(json.dumps(given.get("pods")), PodsConfig, f"pods of {path}")

    async def serve(stop: asyncio.Event) -> None:
        launcher = PodLauncher(connect(), pods, Path(config.run_dir))
        await Agent(config, launcher).run(stop, partial(print_ready, node=config.node))

    run_until_signal(serve)


if __name__ == "__main__":
    main()
