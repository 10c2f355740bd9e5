"""Configuration files: TOML with a table for each part, checked whole before anything starts."""

import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from plexrl.cluster.config.checks import ConfigProblem, check_tables, config_error
from plexrl.cluster.config.network import NetworkOptions
from plexrl.cluster.config.options import PartSettings, check_argument
from plexrl.cluster.config.ray_options import RayOptions
from plexrl.cluster.config.schema import CLUSTER_FILE, MOVED, NODE_FILE, ConfigSection
from plexrl.errors import ConfigError, InvalidRequestError
from plexrl.events.config import BrokerConfig

FILE_BYTES_MAX = 1 << 20
PARTS = ("scheduler", "router", "rollout", "statemanager", "agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """The content of a cluster's file, with the types of the options."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ClusterOptions` that the file sets, except the others here."""
    network: NetworkOptions | None = None
    ray: RayOptions | None = None
    events: BrokerConfig | None = None
    settings: PartSettings = field(default_factory=PartSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFile:
    """The content of a node's file, with the types of the options."""

    options: Mapping[str, Any] = field(default_factory=dict)
    settings: PartSettings = field(default_factory=PartSettings)


def read_cluster_file(path: Path) -> ClusterFile:
    """The file of `plexrl up --config`.

    Raises:
        ConfigError: it has problems; the error lists all of them.
    """
    tables = checked_tables(path, CLUSTER_FILE)
    options = dict(tables.get("cluster", {}))
    network = tables.get("network")
    ray, events = tables.get("ray"), tables.get("events")
    for part, names in MOVED.items():
        options |= {name: value for name, value in tables.get(part, {}).items() if name in names}
    return ClusterFile(
        options=options,
        network=None if network is None else NetworkOptions(**network),
        ray=None if ray is None else RayOptions(**ray),
        events=None if events is None else BrokerConfig(**events),
        settings=_part_settings(tables),
    )


def read_node_file(path: Path) -> NodeFile:
    """The file of `plexrl node join --config`. Raises as `read_cluster_file`."""
    tables = checked_tables(path, NODE_FILE)
    return NodeFile(options=tables.get("node", {}), settings=_part_settings(tables))


def is_node_file(path: Path) -> bool:
    """Whether the file is that of a node. False if it cannot be read, which is reported later."""
    try:
        return "node" in _parse(path)
    except ConfigError:
        return False


def checked_tables(path: Path, sections: Sequence[ConfigSection]) -> dict[str, dict[str, Any]]:
    """The values of a file by table, with their types. Raises as `read_cluster_file`."""
    tables, problems = check_tables(_parse(path), sections)
    problems += _secret_problems(path, tables)
    if problems:
        raise config_error(str(path), problems)
    return tables


def _parse(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX + 1)
        if len(text) > FILE_BYTES_MAX:
            raise config_error(
                str(path),
                [ConfigProblem("", f"longer than {FILE_BYTES_MAX} bytes: is it the right one?")],
            )
        return tomllib.loads(text.decode())
    except (OSError, UnicodeDecodeError) as error:
        raise config_error(str(path), [ConfigProblem("", f"it cannot be read: {error}")]) from error
    except tomllib.TOMLDecodeError as error:
        raise config_error(str(path), [ConfigProblem("", f"it is no TOML: {error}")]) from error


def _secret_problems(path: Path, tables: Mapping[str, Mapping[str, Any]]) -> list[ConfigProblem]:
    """A password in a file that other users can read."""
    journal = tables.get("scheduler", {}).get("journal")
    if journal is None or not path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        return []
    try:
        check_argument(journal)
    except InvalidRequestError:
        return [
            ConfigProblem(
                "scheduler.journal",
                f"this URL may hold a password, and other users can read the file: run `chmod 600 "
                f"{path}`, or leave the password out",
            )
        ]
    return []


def _part_settings(tables: Mapping[str, Mapping[str, Any]]) -> PartSettings:
    """The settings without an option, as plain values for the parts' own configuration files."""
    found = {
        part: {
            name: msgspec.to_builtins(value)
            for name, value in tables.get(part, {}).items()
            if name not in MOVED.get(part, ())
        }
        for part in PARTS
    }
    return PartSettings(**found)
