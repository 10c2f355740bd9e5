"""Cached replies about API keys never outlive a revocation; a claim carries the caller's scope."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request

from plexrl.access import OPERATORS, AccessRole
from plexrl.errors import AuthenticationError, UnavailableError
from plexrl.router.execution.scheduler_link import SchedulerLink
from plexrl.router.http.routes.streams import _encoded
from plexrl.router.http.streams.events import StreamEvent, json_line
from plexrl.router.server.refused_keys import RefusedKeys
from plexrl.router.services import services as services_module
from plexrl.router.services.authentication import Caller, KeyCache, key_digest
from plexrl.router.services.services import RouterServices
from plexrl.scheduler.state.messages.calls import take_scope
from plexrl.wire.rpc import Peer

Plain = dict[str, Any]


def test_a_key_is_looked_up_once_until_the_scheduler_reports_a_revocation(tmp_path: Path) -> None:
    async def talk() -> None:
        requests: list[Plain] = []
        valid = True
        scheduler: list[Peer] = []

        async def authenticate(_: Peer, params: Plain) -> Plain:
            requests.append(params)
            if not valid:
                raise AuthenticationError("revoked")
            return {"tenant": "a", "is_operator": False}

        async def hello(peer: Peer, _: Plain) -> Plain:
            scheduler.append(peer)
            return {}

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await Peer(reader, writer, {"hello": hello, "authenticate": authenticate}).run()

        keys = KeyCache(RefusedKeys(burst=20, per_s=1.0))
        link = SchedulerLink(
            [f"unix:{tmp_path}/s"], "r", {"forget_callers": keys.on_forget}, keys.clear
        )
        keys.scheduler = link
        server = await asyncio.start_unix_server(serve, tmp_path / "s")
        running = asyncio.create_task(link.run())
        await link.connected.wait()
        try:
            for _ in range(3):
                assert (await keys.caller_of("Bearer k", "10.0.0.1")).tenant == "a"
            assert requests == [{"key_digest": key_digest("k")}]
            valid = False
            await scheduler[0].call("forget_callers")
            with pytest.raises(AuthenticationError):
                await keys.caller_of("Bearer k", "10.0.0.1")
            valid = True
            await keys.caller_of("Bearer k", "10.0.0.1")
            server.close()
            scheduler[0].close()
            while link.connected.is_set() and len(requests) == 3:
                # No revocation can be reported now, so cached replies are void.
                try:
                    await keys.caller_of("Bearer k", "10.0.0.1")
                except UnavailableError:
                    break
                await asyncio.sleep(0)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            server.close()

    asyncio.run(talk())


def test_a_reply_from_before_a_revocation_is_not_cached(tmp_path: Path) -> None:
    async def talk() -> None:
        requests = 0
        arrived, answer = asyncio.Event(), asyncio.Event()

        async def authenticate(_: Peer, __: Plain) -> Plain:
            nonlocal requests
            requests += 1
            arrived.set()
            await answer.wait()
            return {"tenant": "a", "is_operator": False}

        async def hello(_: Peer, __: Plain) -> Plain:
            return {}

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await Peer(reader, writer, {"hello": hello, "authenticate": authenticate}).run()

        keys = KeyCache(RefusedKeys(burst=20, per_s=1.0))
        link = SchedulerLink([f"unix:{tmp_path}/s"], "r", {}, keys.clear)
        keys.scheduler = link
        server = await asyncio.start_unix_server(serve, tmp_path / "s")
        running = asyncio.create_task(link.run())
        await link.connected.wait()
        try:
            asking = asyncio.create_task(keys.caller_of("Bearer k", "10.0.0.1"))
            await arrived.wait()
            keys.clear()
            answer.set()
            await asking
            await keys.caller_of("Bearer k", "10.0.0.1")
            assert requests == 2
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            server.close()

    asyncio.run(talk())


def test_the_scheduler_reads_the_callers_scope_from_the_claim() -> None:
    for role in AccessRole:
        caller = Caller("a", role)
        assert caller.sees_all == (role in OPERATORS)
        assert take_scope({**caller.claim, "job": "j"}) == (caller.scope, {"job": "j"})


def test_a_token_stream_does_not_outlive_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    reply: Exception | None = None
    asked = 0

    class Keys:
        def authorization_of(self, _: Request) -> str:
            return "Bearer k"

        async def caller_of(self, *_: str) -> None:
            nonlocal asked
            asked += 1
            if reply is not None:
                raise reply

    class Reader:
        async def events(self) -> AsyncIterator[StreamEvent]:
            for number in range(3):
                yield {"rows": [number]}

    request = Request({"type": "http", "headers": [], "client": None, "state": {}})
    services: Any = SimpleNamespace(keys=Keys(), shutdown=SimpleNamespace(has_begun=False))
    services.check_still_valid = partial(RouterServices.check_still_valid, services)

    async def read() -> list[StreamEvent]:
        reader: Any = Reader()
        return [json.loads(line) async for line in _encoded(services, request, reader, json_line)]

    whole = [{"rows": [number]} for number in range(3)]
    assert asyncio.run(read()) == whole
    assert asked == 1, "not at each event"
    monkeypatch.setattr(services_module, "KEY_CHECK_S", 0.0)
    reply = UnavailableError("the scheduler restarts")
    assert asyncio.run(read()) == whole
    reply = AuthenticationError("revoked")
    (event,) = asyncio.run(read())
    assert event["error"]["code"] == "unauthenticated"
