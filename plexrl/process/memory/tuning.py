"""Environment variables that speed up large memory copies, for processes that move state.

glibc uses streaming stores only for the largest copies. Blocks of 1 to 64 MiB are copied at least
1.5 times as fast with them. The threshold can only be set before a process starts.
"""

import platform
from collections.abc import Mapping

_TUNABLE = "glibc.cpu.x86_non_temporal_threshold"
_THRESHOLD = "0x80000"
"""512 KiB."""


def tune(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a StateManager, or for a node agent and its workers. The operator's own
    setting is kept."""
    found = dict(environment)
    if platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc":
        tunables = found.get("GLIBC_TUNABLES", "")
        if _TUNABLE not in tunables:
            ours = f"{_TUNABLE}={_THRESHOLD}"
            found["GLIBC_TUNABLES"] = f"{tunables}:{ours}" if tunables else ours
    return found
