"""What every kind of deployment has, for a blocking controller."""

import threading
from copy import copy
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

from plexrl.client import requests
from plexrl.client.controller import recover_call
from plexrl.client.futures import Future
from plexrl.client.requests import Submission
from plexrl.client.transport import Call, Transport

if TYPE_CHECKING:
    from plexrl.tokenizer import Tokenizer

Plain = dict[str, Any]


class Deployment:
    """One logical model of a job; its operations run in the order of submission."""

    def __init__(self, transport: Transport, deployment: str) -> None:
        self._transport = transport
        self.deployment = deployment
        """`<job>/<name>`."""
        self._submitting = threading.Lock()
        self._deadline_s: float | None = None

    def within(self, deadline_s: float) -> Self:
        """This deployment, with a deadline for what is submitted by it: an operation that has not
        begun so many seconds after its submission never runs, and its future raises
        `DeadlineExceededError`. A generation that runs by then ends with what it has; anything else
        that runs is finished.

        Raises:
            InvalidRequestError: `deadline_s` is no number above 0.
        """
        limited = copy(self)
        limited._deadline_s = requests.checked_deadline(deadline_s)
        return limited

    def barrier(self) -> Future[Plain]:
        """Finished when everything submitted before it is."""
        return self._submit(requests.barrier(self.deployment))

    def load_checkpoint(self, name: str, *, job: str | None = None) -> Future[Plain]:
        """Restore a checkpoint of this job, or of another one of the tenant's."""
        return self._submit(requests.load_checkpoint(self.deployment, name, job))

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
        `forward_backward`s since the last step."""
        job, _, name = self.deployment.rpartition("/")
        path = f"/v1/jobs/{quote(job)}/deployments/{quote(name)}"
        return dict(self._transport.request(Call(method="GET", path=path)).json())

    def tokenizer(self) -> "Tokenizer":
        """The model's tokenizer. Needs the `tokenizers` library (`plexrl[text]`)."""
        from plexrl.tokenizer import Tokenizer

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
