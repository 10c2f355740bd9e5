"""A body that cannot be kept is refused with the reason, when all of it has arrived."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request

from plexrl.access import AccessRole
from plexrl.errors import PlexRLError, StorageFullError
from plexrl.router.blobs.directory import DirectoryBlobStore
from plexrl.router.blobs.store import INLINE_BYTES_MAX
from plexrl.router.blobs.upload_admission import UploadAdmission
from plexrl.router.server.request_limits import BODY_KEY, LimitedBody
from plexrl.router.services.authentication import Caller
from plexrl.router.services.services import RouterServices
from plexrl.wire.tensors import MEDIA_TYPE
from tests.small_disk import small_disk

PART_BYTES = 1 << 20


class Body:
    """A client's body of so many parts, as the server hands it to the application."""

    def __init__(self, parts: int) -> None:
        self.left = parts

    async def receive(self) -> dict[str, Any]:
        self.left -= 1
        assert self.left >= 0, "the application waits for more than the body"
        return {"type": "http.request", "body": bytes(PART_BYTES), "more_body": self.left > 0}


async def refusal(store: DirectoryBlobStore, client: Body) -> PlexRLError:
    """The error with which an upload ends."""
    services = object.__new__(RouterServices)
    services.blobs, services.uploads = store, UploadAdmission(1 << 30, 1 << 30)
    services.body_bytes_max = 1 << 30
    headers = [(b"content-type", MEDIA_TYPE.encode())]
    scope: dict[str, Any] = {"type": "http", "headers": headers, "state": {}}
    body = LimitedBody(scope, client.receive, 1 << 20, 60.0)
    scope["state"][BODY_KEY] = body
    with pytest.raises(PlexRLError) as caught:
        async with services.upload(Request(scope, body.receive), Caller("t", AccessRole.MEMBER)):
            pass
    return caught.value


@pytest.mark.parametrize("parts", [3, 4, 8])
def test_a_full_disk_is_the_answer_also_to_a_body_that_ends_with_the_failed_write(
    tmp_path: Path, parts: int
) -> None:
    assert parts * PART_BYTES > INLINE_BYTES_MAX
    with small_disk(tmp_path / "disk", "1m") as disk:
        store, client = DirectoryBlobStore(disk.path / "blobs"), Body(parts)
        error = asyncio.run(refusal(store, client))
        assert isinstance(error, StorageFullError)
        assert client.left == 0, "a client that still sends does not read the answer"
        assert list((disk.path / "blobs").iterdir()) == []
