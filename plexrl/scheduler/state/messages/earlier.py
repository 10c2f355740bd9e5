"""Turns messages and records of data directories that an earlier version wrote into today's.

Until snapshots of format 6, an API key had no role: it was an operator's, or a member's of its
tenant. Until format 5, a deployment was one record. Until format 4, errors and settings were JSON
text in fields `error_json` and `settings_json`. Until format 2, the parameters of an operation were
text in a field `params_json`, and one type was for the runs of all kinds. Each function changes
plain values in place, before they are typed; the journal and the snapshots use nothing else.
"""

import re
from collections.abc import Mapping

import msgspec

from plexrl.access import AccessRole
from plexrl.errors import ExecutionError, PlexRLError, from_wire
from plexrl.scheduler.state.operation import error_view
from plexrl.wire.codec import JsonObject
from plexrl.wire.messages.cluster_views import ErrorView
from plexrl.wire.operations import PARAMS_BY_KIND, OperationKind

EARLIER_FIELDS = re.compile(rb'"(params|error|settings)_json":')
"""Matches a line of a journal that `upgrade_event` has to change."""

ONE_RECORD = 5
"""The last format in which a deployment was one record."""
TEXT_PARAMS = 2
"""The last format of snapshots with parameters as text."""
ONE_GROUP = 3
"""The last format in which a deployment had one group."""
PARTS: Mapping[str, tuple[str, ...]] = {
    "spec": (
        *("kind", "workers", "state_bytes", "exclusive", "spec_json", "created_spec_json"),
        *("node_type", "preemptible", "shares_if_scarce", "shares_for", "pace", "checkpoints"),
    ),
    "placement": ("groups", "ranks", "nodes", "reservation"),
    "wpg": (
        *("state", "residency", "processes", "moving", "moves", "stored", "published"),
        *("reader_nodes", "backoff", "no_snapshot_until"),
    ),
    "work": (
        *("queue", "running", "waiting_gradients", "unacknowledged", "trainer_step"),
        *("in_flight", "replay", "watch_at"),
    ),
    "demand": (
        *("estimates", "trace", "has_prior", "cycles", "burst", "switch_times", "metered_at"),
        *("memory", "peak_bytes"),
    ),
}
"""The parts of a deployment, with the fields that were in one record."""


def upgrade_event(event: JsonObject) -> None:
    """An event of an earlier journal."""
    _type_params(event)
    _type_error(event)
    if (text := event.pop("settings_json", "")) != "":
        event["settings"] = msgspec.json.decode(text, type=JsonObject)


def upgrade_report(params: Mapping[str, object]) -> dict[str, object]:
    """The parameters of a report; a router of an earlier version is about to be replaced, and what
    its workers have done must not be lost."""
    found = dict(params)
    _type_error(found)
    return found


def upgrade_state(state: JsonObject, version: int) -> None:
    """The state in a snapshot of a format from 2 to 6."""
    for tenant in state["tenants"].values():
        _give_roles(tenant)
    if version > ONE_RECORD:
        return
    _upgrade_messages(state, version)
    for deployment in state["deployments"].values():
        _divide(deployment)


def _give_roles(tenant: JsonObject) -> None:
    """Nobody gains rights by an upgrade: a tenant's key could not manage keys before."""
    role = AccessRole.OPERATOR if tenant["is_operator"] else AccessRole.MEMBER
    tenant["keys"] = {
        digest: {"created_at": at, "role": role.value} for digest, at in tenant["keys"].items()
    }


def _divide(deployment: JsonObject) -> None:
    """Put the fields of a deployment into its parts."""
    record = deployment.pop("placement", None)
    for part, names in PARTS.items():
        deployment[part] = {name: deployment.pop(name) for name in names if name in deployment}
    deployment["placement"]["record"] = record


def _upgrade_messages(state: JsonObject, version: int) -> None:
    """Change operations, and deployments that are still one record."""
    for operation in state["operations"].values():
        _type_error(operation)
    for deployment in state["deployments"].values():
        for failure in deployment["unacknowledged"]:
            _type_error(failure)
        if version <= ONE_GROUP:
            group = deployment.pop("group", None)
            deployment["groups"] = [] if group is None else [group]
    if version > TEXT_PARAMS:
        return
    for operation in state["operations"].values():
        _type_params(operation)
    for deployment in state["deployments"].values():
        for run in deployment["running"].values():
            _type_params(run)
        if deployment["moving"] is not None:
            # Its kind is the tag of today's type.
            _type_params(deployment["moving"])


def _type_error(message: JsonObject) -> None:
    text = message.pop("error_json", None)
    if text:
        message["error"] = _read_error(text)


def _read_error(text: str) -> ErrorView:
    """The error of a report, which earlier versions journalled even if they could not read it."""
    error: PlexRLError
    try:
        error = from_wire(msgspec.json.decode(text, type=JsonObject))
    except (ValueError, RecursionError):
        error = ExecutionError(f"the run failed, and its report cannot be read: {text[:200]}")
    return error_view(error)


def _type_params(message: JsonObject) -> None:
    text = message.pop("params_json", None)
    if text is None:
        return
    kind = PARAMS_BY_KIND.get(OperationKind(message["kind"]))
    # Parameters were written with all their fields. Simulations had none, whatever the kind.
    if kind is None or text == "{}":
        message["params"] = None
    else:
        message["params"] = {"type": kind.__name__, **msgspec.json.decode(text, type=JsonObject)}
