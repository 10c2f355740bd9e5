"""Print a daemon's status as JSON: `python -m plexrl.statemanager.client.status SOCKET
KEY_FILE`."""

import argparse
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from plexrl.errors import PlexRLError
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.protocol.ticket_key import read_ticket_key
from plexrl.statemanager.protocol.tickets import AGENT

TIMEOUT_S = 5.0


def main() -> None:
    """Print one JSON object: the daemon's usage report, or `{"error": …}`."""
    parser = argparse.ArgumentParser(prog="python -m plexrl.statemanager.client.status")
    parser.add_argument("socket")
    parser.add_argument("key_file", type=Path)
    given = parser.parse_args()
    try:
        found = _request_usage(given.socket, given.key_file)
    except PlexRLError as error:
        found = {"error": error.to_wire()}
    sys.stdout.write(json.dumps(found) + "\n")


def _request_usage(socket: str, key_file: Path) -> dict[str, Any]:
    client = StateManagerClient(
        socket,
        deployment="",
        rank=0,
        world_size=1,
        ticket=read_ticket_key(key_file).mint(AGENT),
        timeout_s=TIMEOUT_S,
    )
    with closing(client):
        return client.usage()


if __name__ == "__main__":
    main()
