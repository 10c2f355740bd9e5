"""A part that leaves a child when it is killed; the child holds its standard output."""

import json
import subprocess
import sys
import time
from pathlib import Path

from plexrl.process.children.startup import print_ready

if __name__ == "__main__":
    config = json.loads(Path(sys.argv[2]).read_text())
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with Path(config["pids"]).open("a") as pids:
        pids.write(f"{child.pid}\n")
    if config.get("ends"):
        sys.exit(1)
    print_ready()
    time.sleep(600)
