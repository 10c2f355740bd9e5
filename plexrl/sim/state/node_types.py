"""Node types by name or from a file.

Memories, links and drives follow the data sheets of NVIDIA's DGX systems (A100: PCIe 4, the others
PCIe 5; 8 drives of 3.84 TB), at about 80 % of the links' nominal rates. `speed` is the ratio of
peak dense bf16 rates (A100 312, H100 and H200 989, B200 2 250 TFLOP/s) to an H200's; jobs reach
different parts of it, so use your own measurement if you have one. Prices are round figures within
the market of spring 2026 (A100 0.80 to 3.00, H100 1.99 to 5.00, H200 2.50 to 7.00; B200: an
assumption); use your own.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.scheduler.placement.capacity.node_pool import SPEEDS
from plexrl.sim.workload.scenario import GIB, NodeType

NODE_TYPES: dict[str, NodeType] = {
    each.name: each
    for each in (
        NodeType(),
        NodeType(name="h100", gpu_memory_bytes=80 * GIB, price=2.25),
        NodeType(
            name="a100",
            gpu_memory_bytes=80 * GIB,
            host_bytes_per_s=25e9,
            speed=SPEEDS["a100"],
            price=1.25,
        ),
        NodeType(name="b200", gpu_memory_bytes=180 * GIB, speed=SPEEDS["b200"], price=4.0),
    )
}

GPUS_MAX = 1024
"""Most GPUs of one node."""

_MAY_BE_ZERO = {"nvme_bytes", "move_fixed_s", "price"}


def node_type(given: str) -> NodeType:
    """The node type of this name, or from a JSON or TOML file of its fields. `base` in the file
    names the type that provides the other fields (default: h200).

    Raises:
        InvalidRequestError: the type or file does not exist, or a field is unknown or out of range.
    """
    if given in NODE_TYPES:
        return NODE_TYPES[given]
    path = Path(given)
    if path.suffix not in (".json", ".toml"):
        raise InvalidRequestError(
            f"node type {given!r} is unknown: use {', '.join(NODE_TYPES)}, or a .json or .toml file"
        )
    values = _read(path)
    base = values.pop("base", "h200")
    if base not in NODE_TYPES:
        raise InvalidRequestError(
            f"{path}: base {base!r} is unknown: use one of {', '.join(NODE_TYPES)}"
        )
    return with_fields(NODE_TYPES[base], {"name": path.stem, **values}, where=str(path))


def with_fields(base: NodeType, values: Mapping[str, Any], *, where: str) -> NodeType:
    """`base` with these fields replaced, each checked.

    Raises:
        InvalidRequestError: as `node_type` does; the message begins with `where`.
    """
    known = {field.name: field.type for field in fields(NodeType)}
    for name, value in values.items():
        if name not in known:
            raise InvalidRequestError(
                f"{where}: a node type has no field {name!r}: use {', '.join(known)}"
            )
        if name == "name":
            good = isinstance(value, str) and bool(value)
            wanted = "a text"
        else:
            whole = known[name] is int
            good = (
                isinstance(value, int if whole else int | float)
                and not isinstance(value, bool)
                and (value > 0 or (value == 0 and name in _MAY_BE_ZERO))
                and value < float("inf")
            )
            wanted = f"a{' whole' if whole else ''} number"
            wanted += " of at least 0" if name in _MAY_BE_ZERO else " above 0"
        if name == "gpus" and good and value > GPUS_MAX:
            good, wanted = False, f"a whole number of at most {GPUS_MAX}"
        if not good:
            raise InvalidRequestError(f"{where}: {name} must be {wanted}, not {value!r}")
    return replace(base, **values)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"cannot read node type {path}: {error}") from error
    try:
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise InvalidRequestError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise InvalidRequestError(f"{path}: a node type is a table of fields, as gpus = 8")
    return values
