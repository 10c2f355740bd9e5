"""Reprs of SDK objects, such as `<TrainDeployment 'sums-1a2b/actor' deadline_s=30>`.

One line, without a request and without the API key.
"""

import re


def handle_repr(handle: object, name: str, *marks: str, **fields: object) -> str:
    """The object's class and name, marks, and the fields that are not None."""
    parts = [type(handle).__name__, repr(name), *marks]
    parts += [f"{key}={value!r}" for key, value in fields.items() if value is not None]
    return f"<{' '.join(parts)}>"


def without_credentials(urls: str) -> str:
    """Comma-separated URLs without user and password."""
    return re.sub(r"//[^/@,]*@", "//", urls)
