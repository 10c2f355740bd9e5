"""Quotes are made by a child process, one at a time, within bounds."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from plexrl.errors import ExecutionError, OverloadedError, PlexRLError
from plexrl.router.execution.scheduler_link import SchedulerLink
from plexrl.router.services.quotes import Quotes
from plexrl.wire.rpc import Peer

Plain = dict[str, Any]
Talk = Callable[[SchedulerLink], Awaitable[None]]


async def with_scheduler(folder: Path, talk: Talk) -> None:
    """Run `talk` with a link to a scheduler whose plans are `{}`."""

    async def hello(_: Peer, __: Plain) -> Plain:
        return {}

    async def read_plan(_: Peer, __: Plain) -> Plain:
        return {"plan": "{}"}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Peer(reader, writer, {"hello": hello, "read_plan": read_plan}).run()

    server = await asyncio.start_unix_server(serve, folder / "s")
    link = SchedulerLink([f"unix:{folder}/s"], "r", {})
    running = asyncio.create_task(link.run())
    try:
        await link.connected.wait()
        await talk(link)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        server.close()


def child(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> str:
    """The name of a module with this source, which a child can run."""
    (folder / "strange_child.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return "strange_child"


async def refusal(quotes: Quotes, tenant: str = "t") -> PlexRLError:
    with pytest.raises(PlexRLError) as caught:
        await quotes.answer(tenant, {"name": "a"}, None)
    return caught.value


def test_a_second_quote_at_the_same_time_is_refused_with_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = child(tmp_path, monkeypatch, "import time\ntime.sleep(60)\n")

    async def talk(link: SchedulerLink) -> None:
        quotes = Quotes(link, module=module)
        first = asyncio.create_task(quotes.answer("t", {"name": "a"}, None))
        await asyncio.sleep(0)
        error = await refusal(quotes, "u")
        assert isinstance(error, OverloadedError)
        assert float(str(error.details["retry_after_s"])) > 0
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        # The slot is free again, and the child is gone: this call gets as far as its own child.
        assert isinstance(await refusal(Quotes(link, module="no_such_module")), ExecutionError)

    asyncio.run(with_scheduler(tmp_path, talk))


def test_a_tenant_is_refused_for_as_long_as_its_quote_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = child(tmp_path, monkeypatch, "print('{}')\n")

    async def talk(link: SchedulerLink) -> None:
        quotes = Quotes(link, module=module)
        assert not await quotes.answer("t", {"name": "a"}, None)
        assert isinstance(await refusal(quotes), OverloadedError)
        assert not await quotes.answer("u", {"name": "a"}, None)

    asyncio.run(with_scheduler(tmp_path, talk))


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("import os\nos.kill(os.getpid(), 9)\n", OverloadedError),
        ("import time\ntime.sleep(60)\n", OverloadedError),
        ("raise ValueError\n", ExecutionError),
    ],
    ids=["killed", "too slow", "a bug"],
)
def test_a_child_without_an_answer_is_a_typed_error_and_frees_the_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, kind: type[PlexRLError]
) -> None:
    module = child(tmp_path, monkeypatch, source)

    async def talk(link: SchedulerLink) -> None:
        quotes = Quotes(link, module=module, seconds_max=2.0)
        assert isinstance(await refusal(quotes, "t"), kind)
        assert isinstance(await refusal(quotes, "u"), kind)

    asyncio.run(with_scheduler(tmp_path, talk))
