"""What every kind of deployment has, for a blocking controller."""

import threading
from copy import copy
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from plexrl.client.calls import requests
from plexrl.client.calls.controller import recover_call
from plexrl.client.calls.requests import Submission
from plexrl.client.calls.transport import Call, Transport
from plexrl.client.data.results import LoadedCheckpoint
from plexrl.client.display.handle_repr import handle_repr
from plexrl.client.futures.futures import Future

if TYPE_CHECKING:
    from plexrl.model.tokenizer import Tokenizer

Plain = dict[str, Any]


class Deployment:
    """One logical model of a job; its operations run in the order of submission.

    Every operation returns a future at once. Any submission raises `EarlierFailureError` where an
    operation before it has failed and nobody has read its future.
    """

    def __init__(self, transport: Transport, deployment: str) -> None:
        self._transport = transport
        self.deployment = deployment
        """`<job>/<name>`."""
        self._submitting = threading.Lock()
        self._deadline_s: float | None = None

    def __repr__(self) -> str:
        return handle_repr(self, self.deployment, deadline_s=self._deadline_s)

    def within(self, deadline_s: float) -> Self:
        """This deployment, with a deadline for what is submitted by it: an operation that has not
        begun `deadline_s` seconds after its submission never runs, and its future raises
        `DeadlineExceededError`. A generation that runs by then ends with what it has; anything else
        that runs is finished.

        Raises:
            InvalidRequestError: `deadline_s` is no number above 0.
        """
        limited = copy(self)
        limited._deadline_s = requests.checked_deadline(deadline_s)
        return limited

    def barrier(self) -> Future[Plain]:
        """Finished when everything submitted before it is. The result is empty."""
        return self._submit(requests.barrier(self.deployment))

    def load_checkpoint(
        self, name: str, *, job: str | None = None, optimizer: bool = True
    ) -> Future[LoadedCheckpoint]:
        """Restore the checkpoint `name` of this job, or of the tenant's job with the id `job`.

        A train deployment also takes over the optimizer's state and its count of steps, unless
        `optimizer` is False: then these begin anew, at zero, which is the way to load a checkpoint
        of `format="hf"`. Gradients that wait for a step are dropped. Other deployments load
        weights only, whatever `optimizer` says.

        Raises, from the future:
            CheckpointNotFoundError: there is none of that name.
            BatchShapeError: it is of another model.
            CorruptStateError: it is damaged; no worker's state has changed.
        """
        return self._submit(
            requests.load_checkpoint(self.deployment, name, job, optimizer=optimizer)
        )

    def recover(self) -> None:
        """Go on after a failed operation whose future was not read: what it halted is accepted
        again. The weights, and the gradients that wait for a step, are those of before it."""
        answer = self._transport.request(recover_call(self.deployment)).json()
        if self._transport.controller is not None:
            self._transport.controller.acknowledged(answer)

    def status(self) -> Plain:
        """Where it runs and where its state lies; of a rollout its `engines` too, where they have
        their weights on the device: samples that run and wait, blocks of the cache in use
        (`blocks_held` of `blocks`), preemptions so far. `waiting_gradients` counts the
        `forward_backward`s since the last step, `trainer_step` the optimizer steps in its
        weights."""
        job, _, name = self.deployment.rpartition("/")
        path = f"/v1/jobs/{quote(job)}/deployments/{quote(name)}"
        return dict(self._transport.request(Call(method="GET", path=path)).json())

    def tokenizer(self) -> "Tokenizer":
        """The model's tokenizer, as the cluster's nodes have it: of a `path` its `tokenizer.json`,
        of a locally made model the character-level one of its vocabulary.

        Raises:
            InvalidRequestError: the `tokenizers` library is missing (`pip install 'plexrl[text]'`).
            NotFoundError: the model has no `tokenizer.json`, or no vocabulary.
        """
        from plexrl.model.tokenizer import Tokenizer

        job, _, name = self.deployment.rpartition("/")
        path = f"/v1/jobs/{quote(job)}/deployments/{quote(name)}/tokenizer"
        return Tokenizer(self._transport.request(Call(method="GET", path=path)).text)

    def _submit(self, submission: Submission) -> Future[Any]:
        return Future(self._transport, self._post(submission), submission.decoder)

    def _post(self, submission: Submission) -> Plain:
        # One at a time, so that the order of calls is the order of submissions.
        controller = self._transport.controller
        with self._submitting:
            if controller is None:
                mark = 0
            else:
                controller.check()
                mark = controller.mark
            call = submission.call.within(self._deadline_s)
            view = dict(self._transport.request(call).json())
            if controller is not None:
                controller.submitted(submission, view, mark)
        return view
