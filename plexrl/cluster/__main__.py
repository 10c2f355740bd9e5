"""A supervisor without a terminal: `python -m plexrl.cluster --data-dir DIR`.

Prints one JSON line with the URL and the operator's key, and ends when its standard input does, so
that it never outlives whoever holds the other end.
"""

import argparse
import os
import sys
from pathlib import Path

from plexrl.cluster.config import JOURNAL_VARIABLE, ClusterOptions, check_argument
from plexrl.cluster.ray_options import RayOptions
from plexrl.cluster.supervisor import Endpoint, run_cluster
from plexrl.errors import PlexRLError

NUMBERS = (
    *("nodes", "gpus-per-node", "gpu-memory-bytes", "host-memory-bytes", "nvme-bytes"),
    *("port", "journal-bytes-max", "routers"),
    *("pending-operations-max", "tenant-operations-max"),
    *("deployment-payload-bytes-max", "tenant-payload-bytes-max"),
    *("connections-max", "address-connections-max", "json-bytes-max"),
    *("metrics-row-bytes-max", "metrics-job-bytes-max", "tenant-live-jobs-max"),
    *("tenant-checkpoints-max", "tenant-checkpoint-bytes-max"),
)


def main() -> None:
    """Run until a signal, or until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m plexrl.cluster", description=__doc__)
    parser.add_argument("--data-dir", type=Path, required=True)
    for name in ("policy", "ordering", "journal", "otlp-endpoint", "host"):
        parser.add_argument(f"--{name}")
    for name in ("node-types", "blocks"):
        parser.add_argument(f"--{name}", type=lambda text: tuple(text.split(",")))
    for name in ("header-timeout-s", "body-timeout-s", "lease-s"):
        parser.add_argument(f"--{name}", type=float)
    for name in ("pin-workers", "new-journal", "api-docs"):
        parser.add_argument(f"--{name}", type=lambda text: text == "True")
    for name in NUMBERS:
        parser.add_argument(f"--{name}", type=int)
    kinds = {"address": str, "node-grace-s": float, "node-replace-s": float}
    for name, kind in {**kinds, "rebuild-operations": int, "snapshot-operations": int}.items():
        parser.add_argument(f"--ray-{name}", type=kind)
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}

    # Taken out, so that it is not for what this process starts.
    named = os.environ.pop(JOURNAL_VARIABLE, None)

    def ready(endpoint: Endpoint) -> None:
        sys.stdout.write(endpoint.to_json() + "\n")
        sys.stdout.flush()

    ray = {name: given.pop(name) for name in list(given) if name.startswith("ray_")}
    try:
        if "journal" in given:
            check_argument(given["journal"])
        elif named is not None:
            given["journal"] = named
        options = (
            RayOptions(
                **{name.removeprefix("ray_"): value for name, value in ray.items()},
                places_per_node=given.pop("gpus_per_node", None),
            )
            if ray
            else None
        )
        run_cluster(ClusterOptions(**given), ready, lifeline=sys.stdin.fileno(), ray=options)
    except PlexRLError as error:
        sys.exit(f"plexrl: {error.message}")


if __name__ == "__main__":
    main()
