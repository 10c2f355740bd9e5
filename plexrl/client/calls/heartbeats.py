"""A controller's heartbeats; the responses report failures."""

import logging
import threading
from urllib.parse import quote

from plexrl.client.calls.controller import Controller
from plexrl.client.calls.transport import Call, Transport
from plexrl.errors import (
    ConnectionLostError,
    ControllerReplacedError,
    JobEndedError,
    PlexRLError,
)

LOG = logging.getLogger(__name__)

AFTER_LOSS_S = 1.0
"""Pause after payloads were sent again: a replay finds the next damaged one when it comes to it."""


def send_heartbeats(
    transport: Transport, job: str, ended: threading.Event, period_s: float
) -> None:
    """Send heartbeats from a thread until `ended` is set or the job has ended."""
    arguments = (transport, job, ended, period_s)
    threading.Thread(target=_beat, args=arguments, daemon=True).start()


def beat(transport: Transport, job: str, within_s: float | None = None) -> bool:
    """Send one heartbeat and store the job's failure from the response; send payloads again that
    the cluster has lost. While the cluster is busy the call waits, or fails after `within_s`
    seconds if given.

    Returns:
        Whether the cluster had lost payloads.
    """
    controller = transport.controller
    assert controller is not None, "only the job's controller sends heartbeats"
    path = f"/v1/jobs/{quote(job)}/heartbeat"
    count = controller.acknowledged_count
    call = Call(method="POST", path=path)
    if within_s is not None:
        call = call.limited_to(within_s)
    reply = transport.request(call).json()
    controller.receive_failure(reply.get("failure"), count)
    lost = reply.get("lost_payloads", ())
    for operation in lost:
        _send_again(transport, controller, operation)
    return bool(lost)


def _send_again(transport: Transport, controller: Controller, operation: str) -> None:
    """Submit an operation again whose payload the cluster has lost."""
    call = controller.sent(operation)
    if call is None:
        LOG.warning("the cluster lost the payload of %s, which is no longer kept here", operation)
        return
    LOG.warning("the cluster lost the payload of %s: sending it again", operation)
    transport.request(call)


def _beat(transport: Transport, job: str, ended: threading.Event, period_s: float) -> None:
    pause_s = period_s
    while not ended.wait(pause_s):
        pause_s = period_s
        try:
            if beat(transport, job):
                pause_s = min(period_s, AFTER_LOSS_S)
        except JobEndedError:
            return
        except ControllerReplacedError as error:
            LOG.error("%s", error)
            return
        except ConnectionLostError as error:
            if transport.is_closed:
                return
            LOG.warning("a heartbeat of %s failed: %s", job, error)
        except PlexRLError as error:
            LOG.warning("a heartbeat of %s failed: %s", job, error)
