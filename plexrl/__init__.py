"""PlexRL: LLM execution for RL with verifiable rewards, as a shared service of the cluster.

A controller uses the names of `plexrl.client.public` as `plexrl.connect`, `plexrl.Batch` and so on.
They are imported at the first use of one: every process of a cluster imports this package, only
controllers need the SDK, and its import takes half a second.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plexrl.client.public import *  # noqa: F403  # one list of names; `public` has it
    from plexrl.client.public import __all__ as __all__
else:
    # Types must not see it: any name would be one of this package.
    def __getattr__(name: str) -> object:
        from plexrl.client import public

        if name != "__all__" and name not in public.__all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = getattr(public, name)
        return globals()[name]

    def __dir__() -> list[str]:
        from plexrl.client import public

        return sorted({*globals(), *public.__all__})
