"""`plexrl events`: follows the events of a cluster at its MQTT broker."""

import json
import os
from typing import Annotated, Any

import typer

from plexrl.cli.cluster.up import options
from plexrl.cli.terminal.context import Json, local_time, write_text
from plexrl.cli.terminal.option_groups import with_option_groups
from plexrl.errors import InvalidRequestError
from plexrl.events.config import PASSWORD_VARIABLE, usable_broker

Below = Annotated[
    str, typer.Argument(help="First levels of the topics, such as jobs or jobs/TENANT.")
]


@with_option_groups
def events(broker: options.Events, below: Below = "", as_json: Json = False) -> None:
    """Follow a cluster's events at its MQTT broker: the present states, then each change."""
    import asyncio

    named = broker.broker()
    if named is None:
        raise InvalidRequestError("name the broker: --mqtt mqtt://HOST[:PORT][/PREFIX]")
    config = usable_broker(named, os.environ.get(PASSWORD_VARIABLE, ""))

    async def follow() -> None:
        from plexrl.events.subscriber import events as all_events

        lines = Lines()
        async for event in all_events(config, below):
            found = _decode(event.payload)
            if as_json:
                write_text(json.dumps({"topic": event.topic, "event": found}) + "\n")
            elif (line := lines.line(event.topic, found)) is not None:
                write_text(line + "\n")

    try:
        asyncio.run(follow())
    except KeyboardInterrupt:
        return


def _decode(payload: bytes) -> Any:
    """The object, the text if it is no JSON, or None if it was removed."""
    text = payload.decode(errors="replace")
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


class Lines:
    """The lines of states for people. An object is published with each change of its parts, such
    as its deployments: only a change of its state, holder or reason is a line."""

    def __init__(self) -> None:
        self._shown: dict[str, list[str]] = {}

    def line(self, topic: str, found: Any) -> str | None:
        """The line of a message, with the time at which a new state began; None: the line would
        say what an earlier one said."""
        if not isinstance(found, dict):
            self._shown.pop(topic, None)
            return f"{'':23}  {topic}: {'removed' if found is None else found}"
        if "next_use_s" in found:
            what = f"{found.get('deployment')} in {found['next_use_s']} s"
            return f"{_time(found.get('at')):23}  {topic}: {what}"
        parts = [str(found.get(name) or "") for name in ("state", "holder", "why")]
        known = self._shown.get(topic)
        if parts == known:
            return None
        self._shown[topic] = parts
        text = ", ".join(part for part in parts if part)
        if known is not None and known[0] == parts[0]:
            # `since` is the time of the state, which an earlier line has shown.
            return f"{'':23}  {topic}: still {text}"
        return f"{_time(found.get('since')):23}  {topic}: {text}"


def _time(at: Any) -> str:
    return local_time(at) if isinstance(at, int | float) else ""
