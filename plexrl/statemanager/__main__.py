"""The StateManager process: `python -m plexrl.statemanager --config FILE`."""

import argparse
import asyncio
import logging
import shutil
import threading
from pathlib import Path

from plexrl.cluster.process import load_config, print_ready, remove_socket, run_until_signal
from plexrl.errors import PlexRLError
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.server import Server
from plexrl.statemanager.store import Store
from plexrl.statemanager.tier import Tier


def main() -> None:
    """Serve until a signal; then keep complete versions on NVMe and clear the host tier."""
    parser = argparse.ArgumentParser(prog="python -m plexrl.statemanager", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    config = load_config(parser.parse_args().config, StateManagerConfig)
    store = Store(
        Tier("host", Path(config.host_dir), persistent=False),
        config.host_bytes,
        Tier("nvme", Path(config.nvme_dir), persistent=True),
        config.nvme_bytes,
    )

    async def serve(stop: asyncio.Event) -> None:
        remove_socket(config.listen)
        server = Server(config, store)
        thread = threading.Thread(target=server.serve, daemon=True)
        thread.start()
        print_ready(listen=config.listen)
        await stop.wait()
        server.close()
        remove_socket(config.listen)

    run_until_signal(serve)
    if config.persist_on_exit:
        try:
            store.spill_all()
        except PlexRLError as error:
            logging.getLogger(__name__).error("not all state could be kept: %s", error)
            return
    shutil.rmtree(config.host_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
