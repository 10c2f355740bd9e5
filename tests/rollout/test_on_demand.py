"""What serves before the rollout service does, and the service's configuration."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from plexrl.errors import InvalidRequestError, NotFoundError, UnavailableError
from plexrl.rollout.on_demand import first_rollout, has_rollouts
from plexrl.rollout.service.config import FOLDER, SUFFIX, RolloutConfig
from plexrl.router.execution.rollout_link import RolloutLink
from plexrl.wire.links.address import UnixAddress
from plexrl.wire.links.credentials import Role
from plexrl.wire.links.dial import Link, serve
from plexrl.wire.rpc import Peer

Plain = dict[str, Any]


def test_the_first_creation_starts_the_service_and_other_requests_do_not(tmp_path: Path) -> None:
    address = UnixAddress(str(tmp_path / "rollout.sock"))

    async def ask() -> None:
        serving = asyncio.create_task(first_rollout(address))
        link, other = (RolloutLink(str(address), None) for _ in range(2))
        found = None
        while found is None:
            with suppress(UnavailableError):
                found = await link.call("list", {"job": None}, timeout_s=10)
            await asyncio.sleep(0)
        assert found == {"rollouts": []}
        for method in ("status", "exchange", "batch", "profile"):
            with pytest.raises(NotFoundError, match="job 'j' has no asynchronous rollout 'r'"):
                await other.call(method, {"job": "j", "name": "r"}, timeout_s=10)
        assert not serving.done()
        created = asyncio.create_task(link.call("create", {"order": {"a": 1}}, timeout_s=10))
        await serving
        # No request of a router that did not start it waits for it.
        with pytest.raises(UnavailableError, match="restarting"):
            await other.call("list", {"job": None}, timeout_s=10)

        async def create(_: Peer, params: Plain) -> Plain:
            return {"joined": params["order"]}

        async def on_link(service: Link) -> None:
            await Peer(service.reader, service.writer, {"create": create}).run()

        # The request that started the service is answered by it.
        server = await serve(address, None, on_link, roles=(Role.ROUTER,))
        assert await created == {"joined": {"a": 1}}
        for each in (link, other):
            await each.close()
        server.close()

    asyncio.run(ask())
    assert not Path(address.path).exists()


def test_a_removed_socket_is_made_again(tmp_path: Path) -> None:
    address = UnixAddress(str(tmp_path / "rollout.sock"))

    async def ask() -> None:
        serving = asyncio.create_task(first_rollout(address))
        for _ in range(2):
            link, found = RolloutLink(str(address), None), None
            while found is None:
                with suppress(UnavailableError):
                    found = await link.call("list", {"job": None}, timeout_s=10)
                await asyncio.sleep(0)
            assert found == {"rollouts": []}
            await link.close()
            await asyncio.to_thread(Path(address.path).unlink)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(ask())


def test_a_cluster_with_a_stored_rollout_needs_the_service(tmp_path: Path) -> None:
    assert not has_rollouts(tmp_path)
    (tmp_path / FOLDER / "ended-job").mkdir(parents=True)
    assert not has_rollouts(tmp_path)
    (tmp_path / FOLDER / "ended-job" / f"r{SUFFIX}").touch()
    assert has_rollouts(tmp_path)


def test_the_operators_key_is_read_and_never_made(tmp_path: Path) -> None:
    config = RolloutConfig(
        listen=("unix:/r.sock",), routers=("http://localhost",), data_dir=str(tmp_path)
    )
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        config.operator_key()
    assert not [*tmp_path.iterdir()]
    (tmp_path / "operator.key").write_text("\n")
    with pytest.raises(InvalidRequestError, match="is empty"):
        config.operator_key()
    (tmp_path / "operator.key").write_text("secret\n")
    assert config.operator_key() == "secret"


def test_an_address_that_no_router_can_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="plain TCP is not offered"):
        RolloutConfig(listen=("tcp://h:1",), routers=("http://localhost",), data_dir=str(tmp_path))
