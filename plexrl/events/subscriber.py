"""Reads a cluster's events from an MQTT broker."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from plexrl.errors import UnavailableError
from plexrl.events.config import BrokerConfig


@dataclass(frozen=True, slots=True)
class ReceivedEvent:
    """One message."""

    topic: str
    """Below the prefix."""
    payload: bytes
    """A JSON object; empty: the object of the topic does not exist any more."""
    was_retained: bool
    """It was published before this subscription."""


async def events(config: BrokerConfig, below: str = "") -> AsyncIterator[ReceivedEvent]:
    """Every event whose topic begins with the levels `below`: first the present states, then those
    that come.

    Raises:
        UnavailableError: the broker cannot be reached, refuses the connection, or has ended it.
        InvalidRequestError: a file of the configuration cannot be used.
    """
    import aiomqtt

    client = aiomqtt.Client(
        config.host,
        config.port,
        username=config.user or None,
        password=config.read_password(),
        tls_context=config.tls_context(),
        protocol=aiomqtt.ProtocolVersion.V5,
        timeout=config.timeout_s,
        keepalive=config.keepalive_s,
    )
    topic = "/".join(filter(None, (config.prefix, below.strip("/"), "#")))
    try:
        async with client:
            await client.subscribe(topic, qos=1)
            async for message in client.messages:
                name = str(message.topic).removeprefix(f"{config.prefix}/")
                payload = message.payload
                assert isinstance(payload, bytes), "paho gives bytes"
                yield ReceivedEvent(name, payload, message.retain)
    except aiomqtt.MqttError as error:
        raise UnavailableError(
            f"no connection to the event broker at {config.host}:{config.port}: {error}"
        ) from error
