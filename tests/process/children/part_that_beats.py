"""A part that beats, until it is told to hang: its event loop, or what its other threads need."""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

from plexrl.process.children.startup import print_ready, run_until_signal

if __name__ == "__main__":
    config = json.loads(Path(sys.argv[2]).read_text())
    with Path(config["pids"]).open("a") as pids:
        pids.write(f"{os.getpid()}\n")

    def read_fifo() -> None:
        """Blocks while nobody writes, as a read from a stalled file system."""
        if Path(config["fifo"]).exists():
            Path(config["fifo"]).read_bytes()

    def hang_if_told() -> None:
        hang = Path(config["hang"])
        if hang.exists():
            hang.unlink()
            time.sleep(600)

    async def serve(stop: asyncio.Event) -> None:
        print_ready()
        while not stop.is_set():
            hang_if_told()
            await asyncio.sleep(0.05)

    run_until_signal(serve, works=read_fifo)
