"""The quota of checkpoints, on a disk that cannot be read."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from plexrl.errors import StorageError
from plexrl.router.blobs.checkpoint_quota import CheckpointQuota


class Owner:
    """Answers as the scheduler does."""

    async def call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        assert (method, params) == ("checkpoint_owner", {"job": "j"})
        bounds = {"checkpoints_max": None, "checkpoint_bytes_max": None}
        return {"is_operator": False, "tenant": "t", "jobs": ["j"], **bounds}


def test_a_disk_that_cannot_be_looked_at_refuses_a_checkpoint_and_spoils_no_state(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoints"
    folder.write_text("no folder")
    quota = CheckpointQuota(Owner(), folder, "r", checkpoints_max=1, bytes_max=None)  # type: ignore[arg-type]
    # A typed error: the executor takes any other for one that may have changed the workers' state.
    with pytest.raises(StorageError, match="cannot be read"):
        asyncio.run(quota.check("j", '{"name": "c"}'))
