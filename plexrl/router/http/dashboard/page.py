"""The page at `/dashboard`: one file without a server behind it but the API, and without a secret.

It shows names that tenants chose, next to a key that an operator typed. So the page may run its own
script only, may speak with this router only, and writes names as text.
"""

import base64
import hashlib
from pathlib import Path
from re import DOTALL, search

PAGE = Path(__file__).with_name("dashboard.html").read_text(encoding="utf-8")


def _digest(element: str) -> str:
    found = search(f"<{element}>(.*?)</{element}>", PAGE, DOTALL)
    assert found is not None
    digest = base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
    return f"'sha256-{digest}'"


HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; connect-src 'self'; script-src {_digest('script')}; "
        f"style-src {_digest('style')}; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
