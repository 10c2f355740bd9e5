"""The API's certificate: new connections use the newest files."""

import asyncio
import logging
import ssl
from pathlib import Path

from plexrl.errors import InvalidRequestError
from plexrl.router.config import HttpsFiles

LOG = logging.getLogger(__name__)

CHECK_S = 10.0


def check_files(files: HttpsFiles) -> None:
    """Refuse files that are no certificate with its key.

    Raises:
        InvalidRequestError: as said.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.certificate, files.key)
    except OSError as error:
        raise InvalidRequestError(
            f"{files.certificate} and {files.key} cannot be used for HTTPS: {error}: give PEM "
            "files of a certificate and of its key"
        ) from error


async def follow_files(files: HttpsFiles, context: ssl.SSLContext) -> None:
    """Load the files into the server's context whenever they have changed, until cancelled."""
    used = _stamp(files)
    while True:
        await asyncio.sleep(CHECK_S)
        found = _stamp(files)
        if found in (used, None):
            continue
        try:
            context.load_cert_chain(files.certificate, files.key)
        except OSError as error:
            # The files may be in the middle of being replaced.
            LOG.warning("the former certificate of the API is used for now: %s", error)
            continue
        used = found
        LOG.info("%s is used from now on", files.certificate)


def _stamp(files: HttpsFiles) -> tuple[tuple[int, int, int], ...] | None:
    """What changes when the files do; None if one is missing."""
    try:
        stats = [Path(path).stat() for path in (files.certificate, files.key)]
    except OSError:
        return None
    return tuple((one.st_mtime_ns, one.st_ino, one.st_size) for one in stats)
