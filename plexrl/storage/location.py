"""Where bytes are kept: a directory of this machine, or an object store by URL."""

import re
from pathlib import Path
from urllib.parse import urlsplit

from plexrl.errors import InvalidRequestError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
PRIVATE = frozenset({"memory"})
"""Protocols whose objects only one process sees."""


def is_url(text: str) -> bool:
    """Whether the text names an object store. A path or a `file:` URL names a directory."""
    return _URL.match(text) is not None and not text.startswith("file://")


def directory(text: str) -> Path:
    """The directory that a path or a `file:` URL names."""
    return Path(text.removeprefix("file://"))


def check_location(name: str, text: str) -> None:
    """Check the setting `name`, a directory or an object store's URL.

    Raises:
        InvalidRequestError: the path is relative, or the URL is malformed, holds credentials, or
            names a store that other processes do not see.
    """
    if not is_url(text):
        if not directory(text).is_absolute():
            raise InvalidRequestError(
                f"{name} {text!r} is neither an absolute path nor a URL: write it as /path or as "
                "s3://bucket/prefix"
            )
        return
    parts = urlsplit(text)
    if "@" in parts.netloc or parts.query or parts.fragment:
        # The URL is not repeated in the message, since it may hold a secret.
        raise InvalidRequestError(
            f"{name} may hold a bucket and a prefix only, as s3://bucket/prefix: give credentials "
            "and the server's address in the environment (AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL)"
        )
    if parts.scheme in PRIVATE:
        raise InvalidRequestError(
            f"{name} {text!r}: other processes do not see {parts.scheme}:// objects; use an object "
            "store such as s3://bucket/prefix, or a directory"
        )
    if not parts.netloc:
        raise InvalidRequestError(f"{name} {text!r} names no bucket: write s3://bucket/prefix")


def join(base: str, *names: str) -> str:
    """The location of `names` below `base`."""
    return "/".join((base.rstrip("/"), *names))
