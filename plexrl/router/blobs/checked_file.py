"""Reads the file of a large blob and checks the digest in its name."""

import fcntl
import os
from pathlib import Path

import xxhash

from plexrl.ids import BlobRef
from plexrl.router.blobs.store import PAYLOAD_SUFFIX, check_digest
from plexrl.router.blobs.upload import map_file, write_all
from plexrl.wire.framing import MappedFile
from plexrl.wire.tensors import Body

READ_BYTES = 1 << 20
"""Bytes that are read and checked at a time."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def read_checked(ref: BlobRef, path: Path) -> Body:
    """The bytes of the blob `ref` in the file `path`, which is not empty.

    Those of a payload are a copy in sealed memory: what the workers receive is what was checked,
    whatever becomes of the file meanwhile. A result is a map of its file, which many clients may
    read at the same time.

    Raises:
        PayloadLostError: they do not match the digest in the blob's name.
        OSError: the file cannot be read. In a map that would be a fatal signal.
    """
    if not ref.endswith(PAYLOAD_SUFFIX):
        _read(ref, path, None)
        return map_file(path)
    descriptor = os.memfd_create("plexrl-payload", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        _read(ref, path, descriptor)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return memoryview(MappedFile.of(descriptor))
    finally:
        os.close(descriptor)


def _read(ref: BlobRef, path: Path, copy: int | None) -> None:
    """Read the whole file, copy it to the descriptor `copy` if given, and check its digest."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if copy is not None:
                write_all(copy, [buffer[:count]])
    check_digest(ref, digest.hexdigest())
