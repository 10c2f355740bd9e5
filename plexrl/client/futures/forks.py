"""Forks of a job: which one a controller is, and the operations that give it the parent's state."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from plexrl.errors import InvalidRequestError
from plexrl.limits import check_numbers

if TYPE_CHECKING:
    # Commands, which make no requests for operations, would load models' architectures with it.
    from plexrl.client.calls.requests import Submission
    from plexrl.wire.messages.run_views import ForkView

VARIABLE = "PLEXRL_FORK"
"""The fork that a script is, as JSON; set by `plexrl fork`."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A job that begins with what another job had after a step."""

    job: str
    """Id of the other job, of the same tenant."""
    step: int
    """Optimizer steps; each trainer of the other job has a checkpoint `NAME-step-STEP`."""
    settings: Mapping[str, str | float | bool] = field(default_factory=dict)
    """What this controller does differently; `Job.setting` reads it."""


def fork_of(environment: Mapping[str, str]) -> Fork | None:
    """The fork that this script is; None: it is none.

    Raises:
        InvalidRequestError: the variable is malformed.
    """
    text = environment.get(VARIABLE)
    if not text:
        return None
    try:
        return msgspec.json.decode(text, type=Fork)
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(f"{VARIABLE} is no fork: {error}") from error


def plain_fork(fork: Fork | None) -> "dict[str, object] | None":
    """`fork` as JSON values. Raises `InvalidRequestError`."""
    if fork is None:
        return None
    check_numbers("fork", {"step": fork.step})
    plain: dict[str, object] = json.loads(json.dumps(asdict(fork)))
    return plain


def named(submission: "Submission", job: str, what: str) -> "Submission":
    """The submission with an id that follows from `what`: a controller that was killed submits it
    again, and it is executed once."""
    return replace(submission, call=replace(submission.call, query={"operation": f"{job}:{what}"}))


def checkpoint_of(deployment: str, step: int) -> str:
    """The checkpoint that the cluster saves by itself after `step` (`checkpoint_every`)."""
    return f"{deployment.rpartition('/')[2]}-step-{step}"


def shared_name(fork: "ForkView", deployment: str) -> str:
    """The name of the parent's checkpoint in the fork, which no schedule of the fork deletes."""
    return f"fork-{checkpoint_of(deployment, fork['step'])}"
