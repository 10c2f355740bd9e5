"""What serves before the rollout service does, and the service's configuration."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from plexrl.errors import InvalidRequestError, NotFoundError, UnavailableError
from plexrl.rollout.on_demand import first_rollout, has_rollouts
from plexrl.rollout.service.config import FOLDER, SUFFIX, RolloutConfig
from plexrl.router.execution.rollout_link import RolloutLink
from plexrl.wire.links.address import UnixAddress


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
        for method in ("status", "exchange", "batch"):
            with pytest.raises(NotFoundError, match="job 'j' has no asynchronous rollout 'r'"):
                await other.call(method, {"job": "j", "name": "r"}, timeout_s=10)
        assert not serving.done()
        with pytest.raises(UnavailableError, match="is starting") as caught:
            await link.call("create", {"order": {}}, timeout_s=10)
        assert caught.value.details["retry_after_s"]
        await serving
        # No request may wait for what has stopped serving.
        for each in (link, other):
            with pytest.raises(UnavailableError, match="restarting"):
                await each.call("list", {"job": None}, timeout_s=10)
            await each.close()

    asyncio.run(ask())
    assert not Path(address.path).exists()


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
