"""Turns messages and records of data directories that an earlier version wrote into today's.

Until snapshots of format 2, the parameters of an operation were JSON text in a field
`params_json`, and one type was for the runs of all kinds. Each function changes plain values in
place, before they are typed; the journal and the snapshots use nothing else.
"""

import re
from typing import Any

import msgspec

from plexrl.wire.operations import PARAMS_BY_KIND, OperationKind

EARLIER_FIELDS = re.compile(rb'"params_json":')
"""Matches a line of a journal that `upgrade_event` has to change."""

Plain = dict[str, Any]

TEXT_PARAMS = 2
"""The last format of snapshots with parameters as text."""


def upgrade_event(event: Plain) -> None:
    """An event of an earlier journal."""
    _type_params(event)


def upgrade_state(state: Plain, version: int) -> None:
    """The state in a snapshot of this format, 2 or 3. Until format 3 a deployment had one group."""
    for deployment in state["deployments"].values():
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


def _type_params(message: Plain) -> None:
    text = message.pop("params_json", None)
    if text is None:
        return
    kind = PARAMS_BY_KIND.get(OperationKind(message["kind"]))
    # Parameters were written with all their fields. Simulations had none, whatever the kind.
    if kind is None or text == "{}":
        message["params"] = None
    else:
        message["params"] = {"type": kind.__name__, **msgspec.json.decode(text, type=Plain)}
