"""Refuses requests whose end is in doubt: h11 tolerates some that a proxy may read otherwise.

If a proxy and the router disagree about the end of a request, a client can hide a second request
from the proxy. So the head of a request, and the trailers of a chunked body, are refused if a line
ends without CR, or continues the line before it (obs-fold), or if the head declares its length in
two ways.
"""

import re

import h11
from h11._receivebuffer import ReceiveBuffer

_BARE_LF = re.compile(rb"(?<!\r)\n")
_FOLDED = re.compile(rb"\n[ \t]")
_LENGTH = re.compile(rb"\r\ncontent-length:", re.IGNORECASE)
_ENCODING = re.compile(rb"\r\ntransfer-encoding:", re.IGNORECASE)
_OLD = re.compile(rb"[^\r\n]* HTTP/1\.0\r\n")


class StrictBuffer(ReceiveBuffer):
    """h11's buffer of received bytes, which refuses ambiguous heads."""

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """As h11's. Raises `h11.RemoteProtocolError`, which is answered 400."""
        before = bytes(self._data)
        lines = super().maybe_extract_lines()
        if lines is not None:
            check_head(before[: len(before) - len(self._data)])
        return lines


def check_head(head: bytes) -> None:
    """Check the lines up to and with the first empty one. Raises `h11.RemoteProtocolError`."""
    if _BARE_LF.search(head):
        raise h11.RemoteProtocolError("a line ends without CR")
    if _FOLDED.search(head):
        raise h11.RemoteProtocolError("a header continues on a second line")
    lengths, encodings = len(_LENGTH.findall(head)), len(_ENCODING.findall(head))
    if lengths + encodings > 1:
        raise h11.RemoteProtocolError("the length of the body is declared twice")
    if encodings and _OLD.match(head):
        raise h11.RemoteProtocolError("HTTP/1.0 has no Transfer-Encoding")
