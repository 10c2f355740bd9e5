"""Errors of the cluster's own storage, as tenants may see them.

Their messages name databases, hosts and folders. Only the operator can mend what they speak of, and
finds it in the logs and in `plexrl status`.
"""

from plexrl.errors import PlexRLError, StorageError

SHOWN = frozenset({"state_lost", "corrupt_state"})
"""Codes of storage errors that speak of the tenant's own state."""


def public_error(error: PlexRLError) -> PlexRLError:
    """`error` without what is the operator's business; its class and code stay."""
    is_own = isinstance(error, StorageError) or error.code == "lease_held"
    if not is_own or error.code in SHOWN:
        return error
    message = (
        f"the cluster cannot take this now ({error.code}); nothing was changed. The same request "
        "succeeds once its operator, who finds the reason in `plexrl status` and in the "
        "scheduler's log, has mended that"
    )
    told = {name: value for name, value in error.details.items() if name == "retry_after_s"}
    return type(error)(message, **told)
