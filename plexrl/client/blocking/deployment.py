"""The base class of deployments, and the OpenAI-compatible endpoint of one, for blocking
controllers."""

import re
import threading
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote

from plexrl.client.calls import requests
from plexrl.client.calls.controller import submit
from plexrl.client.calls.requests import Submission
from plexrl.client.calls.transport import Transport, deployment_path
from plexrl.client.data.results import CapturedSegment, LoadedCheckpoint, decode_segments
from plexrl.client.display.handle_repr import handle_repr
from plexrl.client.futures.futures import Future
from plexrl.wire.messages.views import DeploymentStatus
from plexrl.wire.parameter_checks import check_name

if TYPE_CHECKING:
    from plexrl.model.text.tokenizer import Tokenizer

FutureT = TypeVar("FutureT", bound=Future[Any])


class Deployment:
    """One model of a job. Its operations run in the order of submission.

    Every operation returns a future at once. A submission raises `EarlierFailureError` if an
    earlier operation has failed and its future was not read.
    """

    def __init__(self, transport: Transport, deployment: str) -> None:
        self._transport = transport
        self.deployment = deployment
        """`<job>/<name>`."""
        self._submitting = threading.Lock()
        self._deadline_s: float | None = None

    def __repr__(self) -> str:
        return handle_repr(self, self.deployment, deadline_s=self._deadline_s)

    if not TYPE_CHECKING:
        # A type checker would accept every name if it saw this method.
        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, Deployment, name)

    def within(self, deadline_s: float) -> Self:
        """A copy of this deployment that gives its operations a deadline: an operation that has not
        begun `deadline_s` seconds after its submission never runs, and its future raises
        `DeadlineExceededError`. A generation that is running then ends with its tokens so far;
        other running operations finish.

        Raises:
            InvalidRequestError: `deadline_s` is not a number above 0.
        """
        limited = copy(self)
        limited._deadline_s = requests.checked_deadline(deadline_s)
        return limited

    def barrier(self) -> Future[dict[str, object]]:
        """Submit an operation without effect, which finishes after all operations before it. The
        result is empty."""
        return self._submit(requests.barrier(self.deployment))

    def load_checkpoint(
        self, name: str, *, job: str | None = None, optimizer: bool = True
    ) -> Future[LoadedCheckpoint]:
        """Restore the checkpoint `name` of this job, or of the tenant's job with the id `job`.

        A train deployment also restores the optimizer's state and step count, unless `optimizer` is
        False: then both restart at zero. Use this to load a checkpoint of `format="hf"`. Gradients
        that wait for a step are dropped. Other deployments load weights only, whatever `optimizer`
        is.

        Raises, from the future:
            CheckpointNotFoundError: there is no checkpoint of that name.
            BatchShapeError: the checkpoint is of another model.
            CorruptStateError: the checkpoint is damaged; no worker's state has changed.
        """
        return self._submit(
            requests.load_checkpoint(self.deployment, name, job, optimizer=optimizer)
        )

    def recover(self) -> None:
        """Continue after a failed operation whose future was not read: the deployment accepts
        operations again. Weights and accumulated gradients are those before the failed one."""
        answer = self._transport.ask("POST", f"{deployment_path(self.deployment)}/recover")
        if self._transport.controller is not None:
            self._transport.controller.acknowledged(answer)

    def end(self) -> None:
        """End this deployment; its job goes on. Its GPUs are free for others at once. Operations
        that it has not carried out fail as cancelled, and it takes no more. Its name is not free:
        creating it again returns the ended deployment. Repeated calls change nothing.

        Raises:
            ConflictError: a rollout of the job needs its weights.
        """
        self._transport.ask("DELETE", deployment_path(self.deployment))

    def status(self) -> DeploymentStatus:
        """State, workers and location of the deployment's model state. A rollout also has `engines`
        if its weights are on the device: running and waiting samples, cache blocks in use
        (`blocks_held` of `blocks`), preemptions so far. `waiting_gradients` counts the
        `forward_backward`s since the last step; `trainer_step` counts the optimizer steps in the
        weights."""
        view: DeploymentStatus = self._transport.ask("GET", deployment_path(self.deployment))
        return view

    def tokenizer(self) -> "Tokenizer":
        """The model's tokenizer: `tokenizer.json` of a model with a `path`, as the nodes have it,
        with its chat templates and end tokens; the character-level tokenizer of the vocabulary of a
        model without one.

        Raises:
            InvalidRequestError: the `tokenizers` library is missing (`pip install 'plexrl[text]'`).
            NotFoundError: the model has no `tokenizer.json`, or no vocabulary.
        """
        from plexrl.model.text.tokenizer import Tokenizer

        found = self._transport.ask("GET", f"{deployment_path(self.deployment)}/text-files")
        return Tokenizer.from_files(found["files"])

    def _submit(self, submission: Submission) -> Future[Any]:
        return self._submit_for(submission, Future)

    def _submit_for(
        self, submission: Submission, future: Callable[..., FutureT], *samples: int
    ) -> FutureT:
        """Submit an operation for this class of future; `samples` is for a `GenerateFuture`."""
        # Under a lock, so that operations are submitted in the order of the calls.
        with self._submitting:
            steps = submit(submission, self._deadline_s, self._transport.controller)
            view = self._transport.run(steps)
        return future(self._transport, view, submission.decoder, *samples)


def missing_attribute(handle: object, base: type[object], name: str) -> AttributeError:
    """The error for an attribute that `handle` lacks; it names the other kinds of `base` that have
    it."""
    holders: list[type] = [each for each in base.__subclasses__() if hasattr(each, name)]
    names = [holder.__name__ for holder in (type(handle), *holders)]
    kind, *others = (
        name.removeprefix("Async").removesuffix("Deployment").lower() for name in names
    )
    text = f"a {kind} deployment has no {name}"
    if others and not name.startswith("_"):
        text += "; " + " and ".join(f"a {other} deployment" for other in others)
        text += " has it" if len(others) == 1 else " have it"
    return AttributeError(text, name=name, obj=handle)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIAccess:
    """Address and key for a client of OpenAI's API: `OpenAI(base_url=…, api_key=…)`."""

    base_url: str
    """URL below which the endpoints are; ends in `/v1`."""
    api_key: str = field(repr=False)
    """Opens this job's endpoints only, until the job ends or has another controller."""
    model: str
    """Name of the model in requests."""

    def for_trajectory(self, name: str) -> "OpenAIAccess":
        """The same endpoint, whose calls are captured as the trajectory `name`.

        Raises:
            InvalidRequestError: `name` cannot be a file name.
        """
        check_name("trajectory", name)
        root = re.sub(r"(/trajectories/[^/]+)?/v1$", "", self.base_url)
        return replace(self, base_url=f"{root}/trajectories/{quote(name)}/v1")


def open_access(transport: Transport, deployment: str) -> OpenAIAccess:
    """The endpoint of `<job>/<name>` with a new key of the job, at the router in use."""
    job, _, name = deployment.rpartition("/")
    made = transport.ask("POST", f"/v1/jobs/{quote(job)}/keys")
    base = f"{transport.url}/v1/jobs/{quote(job)}/deployments/{quote(name)}/openai/v1"
    return OpenAIAccess(base_url=base, api_key=made["api_key"], model=name)


def read_captured(transport: Transport, deployment: str, trajectory: str) -> list[CapturedSegment]:
    """The segments of a captured trajectory."""
    check_name("trajectory", trajectory)
    job, _, name = deployment.rpartition("/")
    path = f"/v1/jobs/{quote(job)}/deployments/{quote(name)}/openai/trajectories"
    return decode_segments(transport.ask("GET", f"{path}/{quote(trajectory)}/captured"))
