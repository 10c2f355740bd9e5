"""A part that works for some seconds of CPU time before it is ready, or hangs instead."""

import json
import os
import sys
import time
from pathlib import Path

from plexrl.cluster.process import print_ready

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
    print_ready()
    time.sleep(600)
