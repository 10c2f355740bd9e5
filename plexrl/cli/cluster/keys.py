"""`plexrl keys`, `login`, `logout` and `audit`: users and services, their keys, what they did."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from plexrl.access import AccessRole, KeyScope
from plexrl.cli.terminal.context import (
    Access,
    Cells,
    Output,
    ShowKey,
    check_shown,
    local_time,
    print_line,
)
from plexrl.cli.terminal.help import CommandGroup
from plexrl.cli.terminal.option_groups import with_option_groups
from plexrl.cluster.data_dir import logins
from plexrl.limits import LIMITS

if TYPE_CHECKING:
    from plexrl.client.blocking.cluster import Cluster

DAY_S = 86_400.0
_HOURS, _LINES = LIMITS["plexrl audit"]["hours"], LIMITS["plexrl audit"]["limit"]
keys_app = typer.Typer(
    cls=CommandGroup,
    help="API keys of users and services, with their roles (operators, admins of a tenant).",
    no_args_is_help=True,
)
Tenant = Annotated[
    str | None,
    typer.Argument(help="The tenant; `operator` for the operator; by default one's own."),
]


@keys_app.command("create")
@with_option_groups
def create_key(
    tenant: Tenant = None,
    role: Annotated[
        AccessRole | None,
        typer.Option(help="By default operator for the operator's tenant, else member."),
    ] = None,
    user: Annotated[str, typer.Option(help="Who answers for what the key does.")] = "",
    name: Annotated[str, typer.Option(help="What a service's key is for.")] = "",
    scope: Annotated[
        KeyScope, typer.Option(help="The part of the role's rights that it has.")
    ] = KeyScope.ALL,
    days: Annotated[
        float | None,
        typer.Option(
            help="Days until it expires; never by default.",
            min=LIMITS["plexrl keys create"]["days"].least,
            max=LIMITS["plexrl keys create"]["days"].most,
        ),
    ] = None,
    show_key: ShowKey = False,
    *,
    access: Access,
    output: Output,
) -> None:
    """Create an API key, shown only now; older keys stay valid until revoked."""
    check_shown(show_key=show_key)
    with access.open() as cluster:
        found = cluster.access.create_key(
            _tenant(cluster, tenant),
            role=None if role is None else role.value,
            user=user,
            name=name,
            scope=scope.value,
            valid_s=None if days is None else days * DAY_S,
        )
    output.table({"tenant": "tenant", "key": "key", "API key": "api_key"}, [found], found)


@keys_app.command("list")
@with_option_groups
def list_keys(access: Access, output: Output, tenant: Tenant = None) -> None:
    """Ids of a tenant's API keys, with role, user and last use; never the keys."""
    with access.open() as cluster:
        found = cluster.access.keys(_tenant(cluster, tenant))
    cells: Cells = {
        "key": "key",
        "role": "role",
        "user": "user",
        "name": "name",
        "scope": "scope",
        "created": lambda each: local_time(each["created_at"]),
        "expires": lambda each: local_time(each["expires_at"]),
        "last used since the scheduler's start": lambda each: local_time(each["last_used_at"]),
    }
    output.table(cells, found)


@keys_app.command("revoke")
@with_option_groups
def revoke_key(
    tenant: Annotated[str, typer.Argument(help="The tenant; `operator` for the operator.")],
    key: Annotated[str, typer.Argument(help="The key's id (`plexrl keys list`).")],
    access: Access,
    output: Output,
) -> None:
    """Revoke an API key of a tenant: every router refuses it from now on."""
    with access.open() as cluster:
        cluster.access.revoke_key(tenant, key)
        found = cluster.access.keys(tenant)
    cells: Cells = {"tenant": lambda _: tenant, "key": lambda _: key, "keys left": len}
    output.table(cells, [found], found)


@keys_app.command("whoami")
@with_option_groups
def whoami(access: Access, output: Output) -> None:
    """Tenant, user, role and scope of the key in use."""
    with access.open() as cluster:
        found = cluster.access.whoami()
    cells: Cells = {name: name for name in ("tenant", "user", "role", "scope", "key")}
    output.table(cells, [found], found)


class AuditOutcome(StrEnum):
    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"
    UNKNOWN = "unknown"


@with_option_groups
def audit(
    tenant: Annotated[str | None, typer.Option(help="Of this tenant.")] = None,
    user: Annotated[str | None, typer.Option(help="Of this user.")] = None,
    target: Annotated[str | None, typer.Option(help="With this in the path.")] = None,
    outcome: Annotated[AuditOutcome | None, typer.Option(help="With this outcome.")] = None,
    hours: Annotated[
        float | None, typer.Option(help="Of the last hours.", min=_HOURS.least, max=_HOURS.most)
    ] = None,
    limit: Annotated[
        int, typer.Option(help="Lines at most.", min=int(_LINES.least), max=int(_LINES.most))
    ] = 100,
    *,
    access: Access,
    output: Output,
) -> None:
    """Who changed what and who was refused, newest first: all for operators, one's own tenant's for
    an admin."""
    with access.open() as cluster:
        found = cluster.access.audit(
            tenant=tenant,
            user=user,
            target=target,
            outcome=None if outcome is None else outcome.value,
            hours=hours,
            limit=limit,
        )
    cells: Cells = {
        "at": "at",
        "tenant": "tenant",
        "user": "user",
        "role": "role",
        "from": "from",
        "request": lambda line: f"{line['method']} {line['path']}",
        "outcome": lambda line: f"{line['outcome']} {line['status'] or ''}",
    }
    output.table(cells, found)


def _tenant(cluster: "Cluster", tenant: str | None) -> str:
    return cluster.access.whoami()["tenant"] if tenant is None else tenant


Url = Annotated[str, typer.Argument(help="The cluster's URL, as in PLEXRL_URL.")]
CaFile = Annotated[
    str | None,
    typer.Option(
        help="PEM file of the authority of the URL's certificate.", envvar="PLEXRL_CA_FILE"
    ),
]


def login(url: Url, ca_file: CaFile = None) -> None:
    """Log in on a cluster in a browser; commands without an API key then act in your name."""
    made = logins.log_in(url, _show, ca=ca_file)
    print_line(f"Logged in. The login is in {logins.store(made)}; plexrl logout {url} ends it.")


def logout(url: Url) -> None:
    """End the login on a cluster."""
    print_line(
        {
            None: f"There is no login at {url}.",
            True: "Logged out.",
            False: "Logged out here. The identity provider has not revoked the login: whoever has "
            "a copy of it can use it until it ends there.",
        }[logins.forget(url)]
    )


def _show(address: str, code: str) -> None:
    print_line(f"Open {address} in a browser, and compare the code: {code}")
