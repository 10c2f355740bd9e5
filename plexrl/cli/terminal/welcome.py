"""What `plexrl` says without a command: where its cluster is, and what to type next."""

import os
from pathlib import Path

from plexrl.cli.terminal.context import DATA_DIR, KEY_VARIABLE, print_line, write_text
from plexrl.cluster.data_dir.endpoint import read_endpoint
from plexrl.cluster.data_dir.folder import data_dir_at

WITH_A_CLUSTER = {
    "status": "what is wrong, and the cluster in a few numbers",
    "jobs": "which jobs run, and which wait",
    "init DIR": "a starter project: a controller to change",
}
WITHOUT_ONE = {
    "up": "run a cluster on this machine",
    "init DIR": "a starter project, which starts a cluster of its own",
    "simulate bundled:philly": "replay a trace of jobs; needs no cluster",
}


def welcome() -> None:
    """Print the place of the cluster, and a few commands. Nothing is sent to it."""
    url = os.environ.get("PLEXRL_URL")
    where = _configured(url) if url else _on_this_machine()
    print_line(where or f"No cluster: none runs on {_data_dir()}, and PLEXRL_URL is not set.")
    commands = {**(WITH_A_CLUSTER if where else WITHOUT_ONE), "--help": "all commands"}
    width = max(map(len, commands))
    write_text("".join(f"  plexrl {name:{width}}  {what}\n" for name, what in commands.items()))


def _configured(urls: str) -> str:
    has_key = os.environ.get(KEY_VARIABLE)
    key = "" if has_key else f" Set {KEY_VARIABLE} to your key, or give --api-key-file."
    return f"The cluster is at {','.join(map(_plain, urls.split(',')))} (PLEXRL_URL).{key}"


def _plain(url: str) -> str:
    """The URL without a user or a password, also if it is no valid URL."""
    url = url.strip()
    scheme = next((each for each in ("https://", "http://") if url.startswith(each)), "")
    return scheme + url.removeprefix(scheme).rpartition("@")[2]


def _on_this_machine() -> str:
    endpoint = read_endpoint(_data_dir())
    if endpoint is None:
        return ""
    kind = "An embedded cluster" if endpoint.is_embedded else "The cluster"
    return f"{kind} of this machine is at {endpoint.url} (data directory {endpoint.data_dir})."


def _data_dir() -> Path:
    return data_dir_at(os.environ.get("PLEXRL_DATA_DIR") or DATA_DIR)
