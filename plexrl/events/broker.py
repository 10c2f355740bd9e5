"""The connection to an MQTT broker: sends the messages of an outbox, and connects again when lost.

After each connection, and after messages were dropped, all states are sent again and retained
states of objects that are gone are removed. MQTT 5 with a fixed client identifier: a broker ends
the connection of a scheduler that led before, and publishes its last will, before it accepts that
of the new one. So the will of a former leader never comes after the state of the present one.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from plexrl.errors import InvalidRequestError, LeaseLostError, StorageError
from plexrl.events.config import BrokerConfig
from plexrl.events.outbox import EventOutbox, Message
from plexrl.events.records import SchedulerRecord
from plexrl.wire.messages.cluster_views import BrokerView

if TYPE_CHECKING:
    import aiomqtt

LOG = logging.getLogger(__name__)

RETRY_S, RETRY_S_MAX = 1.0, 30.0
"""Pause before the next connection, doubled with each failure, and its bound."""
IN_FLIGHT: Final = 10
"""Messages that are sent before the first is acknowledged; no broker refuses so few."""
STATES: Final = ("jobs", "nodes", "groups")
"""First level of the topics of retained states, below the prefix."""
FAREWELL_S = 5.0
"""Time limit for the last message when the scheduler stops."""

AllStates = Callable[[dict[str, bytes]], Sequence[Message]]
"""Returns all states now, given what the broker has retained by topic."""


class Broker:
    """Sends messages until `run` is cancelled; `run` ends at no other time."""

    def __init__(
        self,
        config: BrokerConfig,
        outbox: EventOutbox,
        all_states: AllStates,
        may_publish: Callable[[], Awaitable[None]],
        online: SchedulerRecord,
    ) -> None:
        """`may_publish` is awaited before each connection, and raises if another scheduler leads.
        `online` is the record of this scheduler."""
        self._config = config
        self._outbox = outbox
        self._all_states = all_states
        self._may_publish = may_publish
        self._online = online
        self.is_connected = False
        self.sent = 0
        """Messages that the broker has acknowledged."""
        self.error = ""
        """Why there is no connection; empty: there is one, or none was tried."""

    def view(self) -> BrokerView:
        """For operators."""
        return {
            "connected": self.is_connected,
            "queued": len(self._outbox),
            "sent": self.sent,
            "dropped": self._outbox.dropped,
            "error": self.error,
        }

    async def run(self) -> None:
        """Connect, and send.

        Raises:
            LeaseLostError: as `may_publish`.
        """
        import aiomqtt

        pause_s = RETRY_S
        while True:
            try:
                await self._may_publish()
                async with self._connected() as client:
                    pause_s = RETRY_S
                    await self._serve(client)
            except LeaseLostError:
                raise
            except (aiomqtt.MqttError, InvalidRequestError, StorageError) as error:
                # Logged once for each reason: a broker may be away for days.
                if str(error) != self.error:
                    LOG.warning(
                        "no connection to the event broker at %s:%d (%s); trying again",
                        *(self._config.host, self._config.port, error),
                    )
                self.error = str(error)
            finally:
                self.is_connected = False
            _raise_lost_cancellation()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_S_MAX)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator["aiomqtt.Client"]:
        import aiomqtt

        config = self._config
        lost = msgspec.structs.replace(
            self._online, state="offline", since=None, why="its connection to the broker was lost"
        )
        client = aiomqtt.Client(
            config.host,
            config.port,
            username=config.user or None,
            password=await asyncio.to_thread(config.read_password),
            tls_context=await asyncio.to_thread(config.tls_context),
            identifier=f"plexrl-{config.prefix}",
            protocol=aiomqtt.ProtocolVersion.V5,
            clean_start=True,
            will=aiomqtt.Will(
                f"{config.prefix}/scheduler", msgspec.json.encode(lost), qos=1, retain=True
            ),
            timeout=config.timeout_s,
            keepalive=config.keepalive_s,
            logger=LOG.getChild("mqtt"),
        )
        async with client:
            yield client

    async def _serve(self, client: "aiomqtt.Client") -> None:
        """Send until the connection is lost, which raises `MqttError`."""
        LOG.info(
            "connected to the event broker at %s:%d; topics begin with %s/",
            *(self._config.host, self._config.port, self._config.prefix),
        )
        self.is_connected, self.error = True, ""
        try:
            await self._send(client, [self._state_of_scheduler()])
            retained = await self._retained(client)
            _raise_lost_cancellation()
            sending = asyncio.create_task(self._send_all(client, retained))
            listening = asyncio.create_task(_until_lost(client))
            tasks = {sending, listening}
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise outcome
        except asyncio.CancelledError:
            await self._say_goodbye(client)
            raise

    async def _send_all(self, client: "aiomqtt.Client", retained: dict[str, bytes]) -> None:
        """Send what waits, then all states, then what comes.

        In this order no topic goes back to an earlier state: the states are collected at a moment
        at which no message waits.
        """
        is_complete = False
        while True:
            while messages := self._outbox.take(IN_FLIGHT):
                try:
                    await self._send(client, messages)
                except BaseException:
                    # Some may be sent twice, which changes nothing.
                    self._outbox.put_back(messages)
                    raise
            if not is_complete or self._outbox.is_incomplete:
                self._outbox.is_incomplete = False
                states = self._all_states(retained)
                for first in range(0, len(states), IN_FLIGHT):
                    await self._send(client, states[first : first + IN_FLIGHT])
                if self._outbox.dropped:
                    await self._send(client, [self._state_of_scheduler()])
                is_complete, retained = True, {}
            await self._outbox.wait()

    async def _send(self, client: "aiomqtt.Client", messages: Sequence[Message]) -> None:
        """Send messages in their order; returns once the broker has acknowledged all of them."""
        # Tasks begin in the order of their creation, and each sends its message before it waits.
        outcomes = await asyncio.gather(
            *(self._publish(client, message) for message in messages), return_exceptions=True
        )
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def _publish(self, client: "aiomqtt.Client", message: Message) -> None:
        from paho.mqtt.packettypes import PacketTypes
        from paho.mqtt.properties import Properties

        properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        if message.payload:
            properties.ContentType = "application/json"
        if message.expires_s is not None:
            properties.MessageExpiryInterval = message.expires_s
        await client.publish(
            f"{self._config.prefix}/{message.topic}",
            message.payload,
            qos=1 if message.is_retained else 0,
            retain=message.is_retained,
            properties=properties,
        )
        self.sent += 1

    def _state_of_scheduler(self, **changes: object) -> Message:
        record = msgspec.structs.replace(self._online, dropped=self._outbox.dropped, **changes)
        return Message("scheduler", msgspec.json.encode(record))

    async def _say_goodbye(self, client: "aiomqtt.Client") -> None:
        """The scheduler stops: say so, if the broker answers soon."""
        import aiomqtt

        offline = self._state_of_scheduler(
            state="offline", since=time.time(), why="the scheduler was stopped"
        )
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._send(client, [offline])
        except (TimeoutError, aiomqtt.MqttError) as error:
            LOG.info("the event broker was not told that the scheduler stops: %s", error)

    async def _retained(self, client: "aiomqtt.Client") -> dict[str, bytes]:
        """The states that the broker retains, by topic below the prefix.

        Retained messages come in answer to a subscription and nothing marks the last one, so a
        message to ourselves follows them. If it does not return, we may not read or not write.
        """
        prefix = self._config.prefix
        end = f"{prefix}/scheduler/retained/{secrets.token_hex(8)}"
        topics = [end, *(f"{prefix}/{kind}/#" for kind in STATES)]
        retained: dict[str, bytes] = {}
        await client.subscribe([(topic, 0) for topic in topics])
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await client.publish(end, b"", qos=0)
                async for message in client.messages:
                    if str(message.topic) == end:
                        break
                    payload = message.payload
                    if isinstance(payload, bytes) and payload:
                        retained[str(message.topic).removeprefix(f"{prefix}/")] = payload
        except TimeoutError:
            LOG.warning(
                "the event broker does not send back what is published below %s/: allow its user "
                "to read and write there, or old states are not removed",
                prefix,
            )
        await client.unsubscribe(topics)
        return retained


def _raise_lost_cancellation() -> None:
    """Raise `CancelledError` if this task was cancelled and goes on all the same: aiomqtt uses
    `asyncio.wait_for`, which in Python 3.11 loses a cancellation that comes with its result."""
    own = asyncio.current_task()
    if own is not None and own.cancelling():
        raise asyncio.CancelledError


async def _until_lost(client: "aiomqtt.Client") -> None:
    """Return only by raising `MqttError`, when the connection is lost."""
    async for _ in client.messages:
        pass
