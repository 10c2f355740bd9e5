"""The checkpoint quota on a disk that cannot be read."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from plexrl.errors import StorageError
from plexrl.router.job_files.checkpoint_quota import CheckpointQuota


class Owner:
    """A fake scheduler."""

    async def call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        assert (method, params) == ("checkpoint_owner", {"job": "j"})
        bounds = {"checkpoints_max": None, "checkpoint_bytes_max": None}
        return {"is_operator": False, "tenant": "t", "jobs": ["j"], **bounds}


def test_an_unreadable_disk_refuses_a_checkpoint_with_a_typed_error(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoints"
    folder.write_text("no folder")
    quota = CheckpointQuota(Owner(), folder, "r", checkpoints_max=1, bytes_max=None)  # type: ignore[arg-type]
    # A typed error: after any other error the executor assumes that the workers' state changed.
    with pytest.raises(StorageError, match="cannot be read"):
        asyncio.run(quota.check("j", '{"name": "c"}'))
