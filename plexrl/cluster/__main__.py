"""A supervisor without a terminal: `python -m plexrl.cluster --data-dir DIR`.

Prints one JSON line with the URL and the operator's key, or with the error. With `--lock` the
cluster is embedded and ends with the last script that uses it (`script_lock.py`). Otherwise it ends
when its standard input ends, so that it does not outlive its parent process.
"""

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

from plexrl.cluster.config.options import JOURNAL_VARIABLE, ClusterOptions, check_argument
from plexrl.cluster.config.ray_options import RayOptions
from plexrl.cluster.data_dir.endpoint import Endpoint
from plexrl.cluster.embedded.script_lock import wait_for_last_script
from plexrl.cluster.supervisor import run_cluster
from plexrl.errors import PlexRLError
from plexrl.events.config import PASSWORD_VARIABLE, BrokerConfig
from plexrl.process.children.startup import print_refused

NOT_ARGUMENTS = frozenset({"data_dir", "places_per_node", "events", "network", "settings"})
"""Options that are set otherwise, or only by `plexrl up`."""


def main() -> None:
    """Run until a signal, or until the lifeline ends."""
    parser = argparse.ArgumentParser(prog="python -m plexrl.cluster", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--lock", type=int, help="descriptor of the data directory's lock")
    parser.add_argument("--temporary", help="remove the data directory at the end")
    for prefix, options_class in (("", ClusterOptions), ("ray-", RayOptions)):
        for name, kind in get_type_hints(options_class).items():
            if name not in NOT_ARGUMENTS:
                parser.add_argument(f"--{prefix}{name.replace('_', '-')}", type=_reader(kind))
    parser.add_argument("--mqtt", help="URL of the broker for events")
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}

    # Removed from the environment, so that child processes do not inherit them.
    named = os.environ.pop(JOURNAL_VARIABLE, None)
    password = os.environ.pop(PASSWORD_VARIABLE, "")

    is_temporary = given.pop("temporary", "") == "True"
    descriptor = given.pop("lock", None)
    if descriptor is None:
        lock, lifeline = None, _wait_for_end_of_input
    else:
        os.set_inheritable(descriptor, False)
        lock = os.fdopen(descriptor, "a+")
        lifeline = partial(wait_for_last_script, given["data_dir"])

    def ready(endpoint: Endpoint) -> None:
        sys.stdout.write(endpoint.to_json() + "\n")
        sys.stdout.flush()

    ray = {name: given.pop(name) for name in list(given) if name.startswith("ray_")}
    try:
        if "journal" in given:
            check_argument(given["journal"])
        elif named is not None:
            given["journal"] = named
        if "mqtt" in given:
            given["events"] = BrokerConfig(url=given.pop("mqtt"), password=password)
        options = (
            RayOptions(
                **{name.removeprefix("ray_"): value for name, value in ray.items()},
                places_per_node=given.pop("virtual_gpus", None),
            )
            if ray
            else None
        )
        run_cluster(ClusterOptions(**given), ready, lifeline, options, lock)
    except PlexRLError as error:
        print_refused(error)
        sys.exit(f"plexrl: {error.message}")
    if is_temporary:
        shutil.rmtree(given["data_dir"], ignore_errors=True)


def _reader(kind: Any) -> Callable[[str], Any]:
    """Parses an option of a field of this type."""
    if kind == tuple[str, ...]:
        return lambda text: tuple(text.split(","))
    if kind == tuple[float, ...]:
        return lambda text: tuple(float(number) for number in text.split(","))
    if kind is bool:
        return lambda text: text == "True"
    union = get_args(kind) or (kind,)
    return int if int in union else float if float in union else str


def _wait_for_end_of_input() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass


if __name__ == "__main__":
    main()
