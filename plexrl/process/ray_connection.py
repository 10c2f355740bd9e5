"""Connects to a Ray cluster, and lists its usable nodes."""

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plexrl.errors import CapacityError, UnavailableError

CONNECT_TIMEOUT_S = 5.0
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The client preface of HTTP/2, with an empty SETTINGS frame (RFC 9113 §3.4)."""
SETTINGS_FRAME = 4
"""Type of a server's first frame, in its fourth byte."""
FRAME_HEAD_BYTES = 9
NAME_CHARACTERS_MAX = 32
"""Longest node name. A node's sockets are in a folder of its name, and their paths must be
short."""
GPU = "GPU"
"""Ray's resource of GPUs."""
ACCELERATOR = "accelerator_type:"
"""Prefix of the Ray resource that names a node's type of GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """One usable node of the Ray cluster."""

    node_id: str
    """Ray's id, hexadecimal; it changes at each start of the node."""
    node: str
    """PlexRL's name: the operator's (`ray start --node-name`), else derived from the id."""
    address: str
    """Address at which the machines of the Ray cluster reach each other."""
    gpus: int
    """Number of slots for workers."""
    resource: str
    """Ray resource of which a slot takes one unit: `GPU` or `CPU`."""
    node_type: str = ""


def connect(address: str, namespace: str) -> None:
    """Make this process a driver of the Ray cluster at `address`. Call this from the main thread:
    Ray replaces its SIGTERM handler.

    Raises:
        UnavailableError: Ray is not installed, or does not answer at the address.
    """
    # Ray reads this when it is imported. PlexRL's processes see all devices of their node.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError as error:
        raise UnavailableError(
            f"--ray needs Ray, which cannot be loaded ({error}): pip install 'plexrl[ray]'"
        ) from error
    if address != "auto":
        _check_server(address)
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        first = str(error).strip().partition("\n")[0].rstrip(".")
        raise UnavailableError(
            f"cannot join Ray at {address!r}: {first}. See `ray status --address {address}`, and "
            "run this on a machine of the Ray cluster, with the same version of Ray"
        ) from error


def disconnect() -> None:
    """Stop being a driver; Ray ends the actors that this driver owned."""
    import ray

    ray.shutdown()


def usable_nodes(places_per_node: int | None) -> list[RayNode]:
    """The living nodes with GPUs, or with `places_per_node` CPUs if that is given; by name."""
    import ray

    return usable(ray.nodes(), places_per_node)


def usable(described: Sequence[dict[str, Any]], places_per_node: int | None) -> list[RayNode]:
    """The usable ones of the nodes that Ray describes."""
    resource = GPU if places_per_node is None else "CPU"
    found: dict[str, RayNode] = {}
    for each in sorted(described, key=lambda each: str(each["NodeID"])):
        has = int(each["Resources"].get(resource, 0)) if each["Alive"] else 0
        gpus = has if places_per_node is None else places_per_node
        if gpus < 1 or has < gpus:
            continue
        node_id = str(each["NodeID"])
        name = _name(each)
        if name in found:
            name = _name_of_id(node_id)
        found[name] = RayNode(
            node_id=node_id,
            node=name,
            address=str(each["NodeManagerAddress"]),
            gpus=gpus,
            resource=resource,
            node_type=_node_type(each["Resources"]),
        )
    return [found[name] for name in sorted(found)]


def none_usable(places_per_node: int | None) -> CapacityError:
    """The error for a Ray cluster without a usable node."""
    if places_per_node is None:
        return CapacityError(
            "no node of the Ray cluster has GPUs: start nodes with `ray start --num-gpus N`, or "
            "use --virtual-gpus N for N workers on the CPUs of each node"
        )
    return CapacityError(
        f"no node of the Ray cluster has {places_per_node} CPUs for --virtual-gpus "
        f"{places_per_node}: lower it, or start larger nodes"
    )


def _check_server(address: str) -> None:
    """Check that a gRPC server answers. Ray itself would try for over a minute, and then end the
    process."""
    host, _, port = address.rpartition(":")
    advice = "start Ray there with `ray start --head`, or give the host:port that it printed"
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
                return
            connection.sendall(HTTP2_PREFACE)
            answer = connection.recv(FRAME_HEAD_BYTES)
    except (OSError, ValueError, OverflowError) as error:
        raise UnavailableError(f"no Ray answers at {address!r} ({error}): {advice}") from error
    if len(answer) < FRAME_HEAD_BYTES or answer[3] != SETTINGS_FRAME:
        raise UnavailableError(f"the server at {address!r} is not a Ray head: {advice}")


def _name(described: dict[str, Any]) -> str:
    """The operator's name of the node, else a name derived from its id. Ray names other nodes by
    their IP address, which several may have."""
    name = str(described["NodeName"])
    if name == described["NodeManagerAddress"] or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        return _name_of_id(str(described["NodeID"]))
    return name if len(name) <= NAME_CHARACTERS_MAX else _name_of_id(str(described["NodeID"]))


def _name_of_id(node_id: str) -> str:
    return f"ray-{node_id[:12]}"


def _node_type(resources: dict[str, Any]) -> str:
    types = sorted(name for name in resources if name.startswith(ACCELERATOR))
    return types[0].removeprefix(ACCELERATOR).lower() if types else ""
