"""Downloads a checkpoint through a router, in pieces that are requested again if they fail."""

import os
import shutil
from pathlib import Path
from urllib.parse import quote

from plexrl.client.calls.transport import Call, Query, Transport
from plexrl.errors import InvalidRequestError, StorageError
from plexrl.process.folders.durable_files import flush_tree, rename_durably
from plexrl.wire.messages.node_queries import CheckpointFiles, FileView

PIECE_BYTES = 16 << 20


def download(transport: Transport, path: str, folder: str | os.PathLike[str]) -> Path:
    """Write the files of the checkpoint at the API's `path` into a new folder. Raises as
    `Job.download_checkpoint`."""
    target = Path(folder)
    if target.exists():
        raise InvalidRequestError(f"{target} exists: give a folder that does not")
    listing: CheckpointFiles = transport.ask("GET", f"{path}/files")
    part = target.with_name(f".{target.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for file in listing["files"]:
            # A router is trusted with the contents, not with paths of this machine.
            place = part / file["path"]
            if not place.resolve().is_relative_to(part.resolve()):
                raise InvalidRequestError(f"the checkpoint has a file outside it: {file['path']!r}")
            place.parent.mkdir(parents=True, exist_ok=True)
            _download(transport, path, listing["version"], file, place)
        flush_tree(part)
        rename_durably(part, target)
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error}: check its disk") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def _download(transport: Transport, path: str, version: str, file: FileView, place: Path) -> None:
    url = f"{path}/files/{quote(file['path'])}"
    with place.open("wb") as out:
        for start in range(0, file["bytes"], PIECE_BYTES):
            stop = min(start + PIECE_BYTES, file["bytes"])
            query: Query = {"start": start, "stop": stop, "version": version}
            call = Call(method="GET", path=url, query=query)
            out.write(transport.request(call).content)
