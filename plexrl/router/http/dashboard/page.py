"""The files of the page at `/dashboard`: plain modules without a build step, and without a secret.

The page shows names that tenants chose, next to a key that an operator typed. So it may run its own
modules only, may speak with this router only, and the browser refuses to make markup of texts
(trusted types).
"""

from pathlib import Path

SITE = Path(__file__).with_name("site")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FILES = {
    str(path.relative_to(SITE)): (path.read_bytes(), TYPES[path.suffix])
    for path in sorted(SITE.rglob("*"))
    if path.is_file()
}
"""(content, media type) of each file, by its path below `/dashboard/`."""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
