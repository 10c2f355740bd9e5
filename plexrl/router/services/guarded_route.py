"""Routes that ask the table of access before their handlers run."""

from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute

from plexrl.access import AccessRole
from plexrl.errors import PermissionDeniedError
from plexrl.router.services.access_table import ROWS, Reach, Rule
from plexrl.router.services.authentication import Caller


class GuardedRoute(APIRoute):
    """A route with a row in the table.

    Raises `LookupError` when it is defined without one.
    """

    prefix: ClassVar[str] = ""
    """What stands before the path of the route in the table."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
        """As `APIRoute`."""
        super().__init__(path, endpoint, **settings)
        for method in self.methods or ():
            self.row(method)

    def row(self, method: str) -> str:
        """The name of the row of the route. Raises `LookupError`: it has none."""
        row = f"{method} {self.prefix}{self.path}"
        if row not in ROWS:
            raise LookupError(f"{row} has no row in access_table.py: say who may use it")
        return row

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, behind the check."""
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            row = self.row(request.method)
            rule = ROWS[row]
            # For the audit log.
            request.state.route, request.state.rule = row, rule
            if rule.needs_key:
                check_access(rule, await request.app.state.services.caller(request), request)
            return await handle(request)

        return guarded


def include_guarded(app: FastAPI, *routers: APIRouter) -> None:
    """Add routes to an application. Raises `LookupError`: one of them asks no table."""
    for router in routers:
        for route in router.routes:
            if not isinstance(route, GuardedRoute):
                raise LookupError(f"{route} is no GuardedRoute: anybody could use it")
            prefix = route.prefix
        app.include_router(router, prefix=prefix)


def check_access(rule: Rule, caller: Caller, request: Request) -> None:
    """Refuse a caller whose role or scope may not use a route. The answer depends on these alone,
    so that it tells nothing about what exists. Raises `PermissionDeniedError`."""
    if rule.of(caller.role, caller.key_scope) is Reach.NONE:
        raise PermissionDeniedError(_refusal(rule, caller))
    if caller.role is AccessRole.JOB and request.path_params.get("job") != caller.job:
        raise PermissionDeniedError(_refusal(rule, caller))


def _refusal(rule: Rule, caller: Caller) -> str:
    if caller.role is AccessRole.JOB:
        return (
            f"the key opens the OpenAI-compatible endpoints of job {caller.job!r} only: use the "
            "tenant's key here"
        )
    if rule.of(caller.role) is not Reach.NONE:
        return f"the key is of scope {caller.key_scope}, which does not include this: use another"
    roles = [role for role in rule.reach if role is not AccessRole.JOB]
    if roles == [AccessRole.OPERATOR]:
        return "this needs the operator's key"
    return f"this needs a key of the role {' or '.join(roles)}: yours is of {caller.role}"
