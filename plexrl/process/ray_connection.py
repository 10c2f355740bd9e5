"""The Ray cluster we run on: connecting to it, and what nodes it has."""

import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plexrl.errors import CapacityError, UnavailableError

CONNECT_TIMEOUT_S = 5.0
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""With which a client begins, and an empty frame of settings (RFC 9113 §3.4)."""
SETTINGS_FRAME = 4
"""Type of the frame that a server begins with: the fourth byte."""
FRAME_HEAD_BYTES = 9
NAME_CHARACTERS_MAX = 32
"""Of a node: sockets lie in a folder of its name, and their paths are short."""
ACCELERATOR = "accelerator_type:"
"""Prefix of the resource by which Ray says what kind of GPUs a node has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """One living node of the Ray cluster that we can use."""

    node_id: str
    """Ray's: hexadecimal, another one after each start of the node."""
    node: str
    """Ours: as the operator named it (`ray start --node-name`), else made of the id."""
    gpus: int
    """Places for workers."""
    resource: str
    """What of Ray's a place takes one of: `GPU` or `CPU`."""
    node_type: str = ""


def connect(address: str, namespace: str) -> None:
    """Make this process a driver of the Ray cluster at `address`; from its main thread, whose
    SIGTERM handler Ray replaces.

    Raises:
        UnavailableError: Ray is not installed, or does not answer there.
    """
    # Read when Ray is loaded. Our processes see all devices of their node.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError as error:
        raise UnavailableError(
            f"--ray needs Ray, which cannot be loaded ({error}): pip install 'plexrl[ray]'"
        ) from error
    if address != "auto":
        _knock(address)
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        first = str(error).strip().partition("\n")[0].rstrip(".")
        raise UnavailableError(
            f"Ray at {address!r} cannot be joined: {first}. See `ray status --address {address}`; "
            "this must run on a machine of the Ray cluster, with its version of Ray"
        ) from error


def disconnect() -> None:
    """Stop being a driver; Ray ends what this one owned."""
    import ray

    ray.shutdown()


def usable_nodes(places_per_node: int | None) -> list[RayNode]:
    """The living nodes that have GPUs, or, where places are asked for, as many CPUs; by name."""
    import ray

    return usable(ray.nodes(), places_per_node)


def usable(described: Sequence[dict[str, Any]], places_per_node: int | None) -> list[RayNode]:
    """Of nodes as Ray describes them, those that we can use."""
    resource = "GPU" if places_per_node is None else "CPU"
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
            gpus=gpus,
            resource=resource,
            node_type=_node_type(each["Resources"]),
        )
    return [found[name] for name in sorted(found)]


def none_usable(places_per_node: int | None) -> CapacityError:
    """Why no node will do, and what to do."""
    if places_per_node is None:
        return CapacityError(
            "no node of the Ray cluster has GPUs: start nodes with `ray start --num-gpus N`, or "
            "say --gpus-per-node N for N workers on the CPUs of each node"
        )
    return CapacityError(
        f"no node of the Ray cluster has {places_per_node} CPUs for --gpus-per-node "
        f"{places_per_node}: lower it, or start larger nodes"
    )


def _knock(address: str) -> None:
    """See that a gRPC server is there. Ray itself would try for a minute and more, and then end the
    process."""
    host, _, port = address.rpartition(":")
    advice = "start Ray there with `ray start --head`, or say the host:port that it printed"
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S) as knocking:
            if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
                return
            knocking.sendall(HTTP2_PREFACE)
            answer = knocking.recv(FRAME_HEAD_BYTES)
    except (OSError, ValueError, OverflowError) as error:
        raise UnavailableError(f"no Ray answers at {address!r} ({error}): {advice}") from error
    if len(answer) < FRAME_HEAD_BYTES or answer[3] != SETTINGS_FRAME:
        raise UnavailableError(f"what answers at {address!r} is not Ray's head: {advice}")


def _name(described: dict[str, Any]) -> str:
    """What the operator named the node; Ray names one without a name after its IP address, which
    several may have."""
    name = str(described["NodeName"])
    if name == described["NodeManagerAddress"] or not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        return _name_of_id(str(described["NodeID"]))
    return name if len(name) <= NAME_CHARACTERS_MAX else _name_of_id(str(described["NodeID"]))


def _name_of_id(node_id: str) -> str:
    return f"ray-{node_id[:12]}"


def _node_type(resources: dict[str, Any]) -> str:
    types = sorted(name for name in resources if name.startswith(ACCELERATOR))
    return types[0].removeprefix(ACCELERATOR).lower() if types else ""
