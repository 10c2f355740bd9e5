"""The files of a model that a path or a checkpoint's URL names, in a local folder.

A checkpoint in an object store is copied to this machine, once for all processes of this user:

    <temporary directory>/plexrl-models-<uid>/<digest>         all but weights
    <temporary directory>/plexrl-models-<uid>/<digest>-whole   with weights
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from plexrl.errors import InvalidRequestError, StorageError
from plexrl.process.folders.durable_files import flush_tree, rename_durably
from plexrl.process.folders.private_folder import make_private_folder
from plexrl.storage.location import is_url
from plexrl.storage.object_store import ObjectStore

KEPT_MAX = 8
"""Copies that stay on a machine, the newest ones."""
MANIFEST = "checkpoint.json"


def model_folder(location: str, *, weights: bool) -> Path:
    """A local folder with the model's files; without `weights`, at least all others.

    Raises:
        InvalidRequestError: there is no complete checkpoint at the URL.
        StoreUnavailableError: the object store does not answer.
        StorageError: this machine cannot hold the copy.
    """
    if not is_url(location):
        return Path(location)
    folder = Path(tempfile.gettempdir()) / f"plexrl-models-{os.getuid()}"
    make_private_folder(folder)
    store = ObjectStore(location)
    try:
        sealed = json.loads(store.read(MANIFEST))
        attempt = str(sealed["checkpoint"]["attempt"])
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequestError(
            f"there is no complete checkpoint at {location}: list those of its job"
        ) from error
    digest = hashlib.blake2b(f"{location} {attempt}".encode(), digest_size=16).hexdigest()
    target = folder / (f"{digest}-whole" if weights else digest)
    try:
        with _locked(folder / f"{target.name}.lock"):
            if not target.exists():
                _copy(store, attempt, target, weights=weights)
                _forget_oldest(folder)
    except OSError as error:
        raise StorageError(
            f"{target} cannot be written ({error}): free space there, or set TMPDIR"
        ) from error
    return target


def _copy(store: ObjectStore, attempt: str, target: Path, *, weights: bool) -> None:
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    for each in store.find(attempt):
        name = each.key.removeprefix(f"{attempt}/")
        # Folders below hold the state of optimizers.
        if "/" in name or (name.endswith(".safetensors") and not weights):
            continue
        with (part / name).open("wb") as out:
            fd = out.fileno()
            store.read_ranges(
                [(each.key, 0, each.nbytes)],
                lambda _, start, data, fd=fd: _write(fd, data, start),  # type: ignore[misc]
            )
    flush_tree(part)
    rename_durably(part, target)


def _write(fd: int, data: bytes, start: int) -> None:
    view = memoryview(data)
    while view.nbytes:
        count = os.pwrite(fd, view, start)
        view, start = view[count:], start + count


def _forget_oldest(folder: Path) -> None:
    kept = [each for each in folder.iterdir() if each.is_dir() and each.suffix != ".part"]
    kept.sort(key=lambda each: each.stat().st_mtime)
    for old in kept[:-KEPT_MAX]:
        # A process that has mapped its files keeps them.
        shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
