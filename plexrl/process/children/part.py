"""A part: one process of a cluster, given by its module and its configuration."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plexrl.process.folders.folders import Folders
from plexrl.process.folders.operator_key import write_private


@dataclass(frozen=True, slots=True)
class Part:
    """One process: `python -m <module> --config <file>`."""

    name: str
    module: str
    config: dict[str, Any]
    folders: tuple[Path, ...] = ()
    """Private folders that hold its sockets and other files, outer ones first. If one disappears,
    nobody can reach the part any more: the folder is made again, and the part is replaced."""


def write_config(part: Part, folders: Folders) -> Path:
    """Write the part's configuration file; returns its path."""
    path = folders.run / f"{part.name}.json"
    # The scheduler's configuration may contain the password of the journal's database.
    write_private(path, json.dumps(part.config, indent=1))
    return path
