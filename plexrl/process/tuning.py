"""What processes that move state need of their environment before they start.

glibc takes streaming stores only for the largest copies. Our blocks of 1 to 64 MiB gain from them
by half and more, and the bound can only be set before the process begins.
"""

import platform
from collections.abc import Mapping

_TUNABLE = "glibc.cpu.x86_non_temporal_threshold"
_THRESHOLD = "0x80000"
"""512 KiB."""


def tuned(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment to start a StateManager in, or a node agent and with it its workers. What the
    operator has set is left as it is."""
    found = dict(environment)
    if platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc":
        tunables = found.get("GLIBC_TUNABLES", "")
        if _TUNABLE not in tunables:
            ours = f"{_TUNABLE}={_THRESHOLD}"
            found["GLIBC_TUNABLES"] = f"{tunables}:{ours}" if tunables else ours
    return found
