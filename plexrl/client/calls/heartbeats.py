"""A controller's heartbeats, which also tell it of failures."""

import logging
import threading
from urllib.parse import quote

from plexrl.client.calls.transport import Call, Transport
from plexrl.errors import (
    ConnectionLostError,
    ControllerReplacedError,
    JobEndedError,
    PlexRLError,
)

LOG = logging.getLogger(__name__)


def send_heartbeats(
    transport: Transport, job: str, ended: threading.Event, period_s: float
) -> None:
    """Have a thread send them until `ended`, or until they are of no use any more."""
    arguments = (transport, job, ended, period_s)
    threading.Thread(target=_beat, args=arguments, daemon=True).start()


def beat(transport: Transport, job: str, within_s: float | None = None) -> None:
    """Tell the cluster that the job's controller lives, and hear of the job's failure; a cluster
    that holds is waited for, unless it is to answer within `within_s` seconds."""
    controller = transport.controller
    assert controller is not None, "whoever sends heartbeats controls the job"
    path = f"/v1/jobs/{quote(job)}/heartbeat"
    mark = controller.mark
    call = Call(method="POST", path=path)
    if within_s is not None:
        call = call.tried_for(within_s)
    controller.heard(transport.request(call).json().get("failure"), mark)


def _beat(transport: Transport, job: str, ended: threading.Event, period_s: float) -> None:
    while not ended.wait(period_s):
        try:
            beat(transport, job)
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
