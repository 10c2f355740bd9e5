"""An agent whose workers are pods: `python -m plexrl.cluster.kubernetes.workers --config FILE`."""

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from plexrl.process.garbage_collection import rare_collections

with rare_collections():
    from plexrl.cluster.kubernetes.api import connect
    from plexrl.cluster.kubernetes.workers.launcher import PodLauncher
    from plexrl.cluster.kubernetes.workers.pods import PodsConfig
    from plexrl.process.children.startup import print_ready, run_part
    from plexrl.worker.agent.agent import Agent
    from plexrl.worker.interface.config import AgentConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PodAgentConfig:
    """The agent's configuration, and that of the pods."""

    agent: AgentConfig
    pods: PodsConfig


async def serve(config: PodAgentConfig, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then end all workers."""
    launcher = PodLauncher(connect(), config.pods, Path(config.agent.run_dir))
    agent = Agent(config.agent, launcher)
    await agent.run(stop, partial(print_ready, node=config.agent.node))


def main() -> None:
    """Serve until a signal, then end all workers."""
    run_part("plexrl.cluster.kubernetes.workers", __doc__, PodAgentConfig, serve)


if __name__ == "__main__":
    main()
