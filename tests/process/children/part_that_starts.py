"""A part that works for some seconds before it is ready or before it ends, or hangs.

A child may work meanwhile.
."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from plexrl.process.children.startup import print_ready


def end(config: dict[str, Any]) -> None:
    """Work for a while, then end."""
    until_s = time.process_time() + config["ends_s"]
    while time.process_time() < until_s:
        pass
    with Path(config["served"]).open("a") as served:
        served.write("0\n")
    sys.exit(0)


if __name__ == "__main__":
    config = json.loads(Path(sys.argv[2]).read_text())
    with Path(config["pids"]).open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    if config["hangs"]:
        time.sleep(600)
    while time.process_time() < config["works_s"]:
        pass
    with Path(config["served"]).open("a") as served:
        served.write(f"{os.getpid()}\n")
    if config["child"]:
        child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        Path(config["child"]).write_text(str(child.pid))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if config["ends_s"]:
        signal.signal(signal.SIGTERM, lambda *_: end(config))
    print_ready()
    time.sleep(600)
