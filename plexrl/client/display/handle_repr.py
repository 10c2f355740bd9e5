"""How handles show themselves: `<TrainDeployment 'sums-1a2b/actor' deadline_s=30>`.

One line, from what is known here: no request is made, and no key is shown.
"""

import re


def handle_repr(handle: object, name: str, *marks: str, **fields: object) -> str:
    """The handle's class and name, marks, and the fields that are not None."""
    parts = [type(handle).__name__, repr(name), *marks]
    parts += [f"{key}={value!r}" for key, value in fields.items() if value is not None]
    return f"<{' '.join(parts)}>"


def without_credentials(urls: str) -> str:
    """URLs with commas between, without the user and password that may stand in them."""
    return re.sub(r"//[^/@,]*@", "//", urls)
