"""Whom a key belongs to is remembered for a while, but never past a revocation."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from plexrl.errors import AuthenticationError, UnavailableError
from plexrl.router.execution.scheduler_link import SchedulerLink
from plexrl.router.http.authentication import Callers, key_digest
from plexrl.wire.rpc import Peer

Plain = dict[str, Any]


def test_a_key_is_asked_about_once_until_the_scheduler_says_forget(tmp_path: Path) -> None:
    async def talk() -> None:
        asked: list[Plain] = []
        valid = True
        scheduler: list[Peer] = []

        async def authenticate(_: Peer, params: Plain) -> Plain:
            asked.append(params)
            if not valid:
                raise AuthenticationError("revoked")
            return {"tenant": "a", "is_operator": False}

        async def hello(peer: Peer, _: Plain) -> Plain:
            scheduler.append(peer)
            return {}

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await Peer(reader, writer, {"hello": hello, "authenticate": authenticate}).run()

        callers = Callers()
        link = SchedulerLink(
            str(tmp_path / "s"), "r", {"forget_callers": callers.on_forget}, callers.forget
        )
        callers.scheduler = link
        server = await asyncio.start_unix_server(serve, tmp_path / "s")
        running = asyncio.create_task(link.run())
        await link.connected.wait()
        try:
            for _ in range(3):
                assert (await callers.of_key("k")).tenant == "a"
            assert asked == [{"key_digest": key_digest("k")}]
            valid = False
            await scheduler[0].call("forget_callers")
            with pytest.raises(AuthenticationError):
                await callers.of_key("k")
            valid = True
            await callers.of_key("k")
            server.close()
            scheduler[0].close()
            while link.connected.is_set() and len(asked) == 3:
                # Nothing would be heard of a revocation now, so what was asked counts no more.
                try:
                    await callers.of_key("k")
                except UnavailableError:
                    break
                await asyncio.sleep(0)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            server.close()

    asyncio.run(asyncio.wait_for(talk(), 60))


def test_an_answer_from_before_a_revocation_is_not_remembered(tmp_path: Path) -> None:
    async def talk() -> None:
        asked = 0
        arrived, answer = asyncio.Event(), asyncio.Event()

        async def authenticate(_: Peer, __: Plain) -> Plain:
            nonlocal asked
            asked += 1
            arrived.set()
            await answer.wait()
            return {"tenant": "a", "is_operator": False}

        async def hello(_: Peer, __: Plain) -> Plain:
            return {}

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await Peer(reader, writer, {"hello": hello, "authenticate": authenticate}).run()

        callers = Callers()
        link = SchedulerLink(str(tmp_path / "s"), "r", {}, callers.forget)
        callers.scheduler = link
        server = await asyncio.start_unix_server(serve, tmp_path / "s")
        running = asyncio.create_task(link.run())
        await link.connected.wait()
        try:
            asking = asyncio.create_task(callers.of_key("k"))
            await arrived.wait()
            callers.forget()
            answer.set()
            await asking
            await callers.of_key("k")
            assert asked == 2
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            server.close()

    asyncio.run(asyncio.wait_for(talk(), 60))
