"""A controller's heartbeats, which also tell it of failures."""

import logging
import threading
from urllib.parse import quote

from plexrl.client.controller import Controller
from plexrl.client.transport import Call, Transport
from plexrl.errors import (
    ConnectionLostError,
    ControllerReplacedError,
    JobEndedError,
    PlexRLError,
)

LOG = logging.getLogger(__name__)


def send_heartbeats(
    transport: Transport,
    controller: Controller,
    job: str,
    ended: threading.Event,
    period_s: float,
) -> None:
    """Have a thread send them until `ended`, or until they are of no use any more."""
    arguments = (transport, controller, job, ended, period_s)
    threading.Thread(target=_beat, args=arguments, daemon=True).start()


def _beat(
    transport: Transport,
    controller: Controller,
    job: str,
    ended: threading.Event,
    period_s: float,
) -> None:
    call = Call(method="POST", path=f"/v1/jobs/{quote(job)}/heartbeat")
    while not ended.wait(period_s):
        try:
            mark = controller.mark
            controller.heard(transport.request(call).json().get("failure"), mark)
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
