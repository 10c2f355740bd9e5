"""Snapshots as they were until format 5, when a deployment was one record without parts."""

from typing import Any

from plexrl.scheduler.state.messages.earlier import PARTS


def flatten(state: dict[str, Any]) -> None:
    """Make each deployment of a snapshot's state one record again."""
    for deployment in state["deployments"].values():
        parts = [deployment.pop(part) for part in PARTS]
        record = next(part.pop("record") for part in parts if "record" in part)
        for part in parts:
            deployment.update(part)
        deployment["placement"] = record
