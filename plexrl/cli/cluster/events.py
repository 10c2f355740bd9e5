"""`plexrl events`: follows the events of a cluster at its MQTT broker."""

import asyncio
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
    named = broker.broker()
    if named is None:
        raise InvalidRequestError("name the broker: --mqtt mqtt://HOST[:PORT][/PREFIX]")
    config = usable_broker(named, os.environ.get(PASSWORD_VARIABLE, ""))

    async def follow() -> None:
        from plexrl.events.subscriber import events as all_events

        async for event in all_events(config, below):
            found = _decoded(event.payload)
            if as_json:
                write_text(json.dumps({"topic": event.topic, "event": found}) + "\n")
            else:
                write_text(_line(event.topic, found) + "\n")

    try:
        asyncio.run(follow())
    except KeyboardInterrupt:
        return


def _decoded(payload: bytes) -> Any:
    """The object, the text if it is no JSON, or None if it was removed."""
    text = payload.decode(errors="replace")
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text


def _line(topic: str, found: Any) -> str:
    if found is None:
        return f"{'':23}  {topic}: removed"
    if not isinstance(found, dict):
        return f"{'':23}  {topic}: {found}"
    since = found.get("since", found.get("at"))
    at = local_time(since) if isinstance(since, int | float) else ""
    parts = [str(found[name]) for name in ("state", "holder", "why") if found.get(name)]
    if "next_use_s" in found:
        parts = [f"{found.get('deployment')} in {found['next_use_s']} s"]
    return f"{at:23}  {topic}: {', '.join(parts)}"
