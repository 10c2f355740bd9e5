"""Who may do what: each route of the API, each role, and whether its tenant's objects or all.

The table is the only place where this is decided. `GuardedRoute` looks a route up when it is
defined, so a route without a row does not exist, and asks the row at each request, before anything
is read of the body. Where a role reaches the objects of its own tenant only, those of other tenants
are answered as if they did not exist. `docs/access.md` prints the table, and
`tests/router/http/test_access.py` walks it on a live router.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from plexrl.access import AccessRole, KeyScope


class Reach(Enum):
    """Whose objects a role reaches by a route."""

    NONE = "none"
    OWN = "own tenant's"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Rule:
    """What each role may do by a route; roles that are not named may not use it."""

    name: str
    reach: Mapping[AccessRole, Reach]
    changes: bool = False
    """It changes something: a key of scope `read` may not use it."""
    is_administrative: bool = False
    """It changes who may do what, or the cluster: it is in the audit log before it is answered."""
    needs_key: bool = True
    is_logged: bool = True
    """If it changes something, the audit log has a line of each request; not of those that a
    controller sends every few seconds for as long as it runs."""

    def of(self, role: AccessRole, scope: KeyScope = KeyScope.ALL) -> Reach:
        """Whose objects a key of that role and scope reaches."""
        if scope is KeyScope.READ and self.changes:
            return Reach.NONE
        if scope is KeyScope.OPENAI and AccessRole.JOB not in self.reach:
            return Reach.NONE
        return self.reach.get(role, Reach.NONE)


def _reach(**roles: Reach) -> Mapping[AccessRole, Reach]:
    return {AccessRole(name): reach for name, reach in roles.items()}


ALL, OWN = Reach.ALL, Reach.OWN
SEEN = _reach(operator=ALL, viewer=ALL, admin=OWN, member=OWN)
HAD = _reach(operator=ALL, admin=OWN, member=OWN)

OPEN = Rule("open", dict.fromkeys(AccessRole, ALL), needs_key=False)
LOGIN = Rule("login", OPEN.reach, changes=True, needs_key=False)
READ = Rule("read", SEEN)
CHANGE = Rule("change", HAD, changes=True)
CHANGE_KEY = Rule("change", HAD, changes=True, is_administrative=True)
REPEAT = Rule("change", HAD, changes=True, is_logged=False)
READ_MODEL = Rule("read model", {**SEEN, AccessRole.JOB: OWN})
INFER = Rule("infer", {**HAD, AccessRole.JOB: OWN}, changes=True)
OBSERVE = Rule("observe", _reach(operator=ALL, viewer=ALL))
OPERATE = Rule("operate", _reach(operator=ALL), changes=True, is_administrative=True)
OVERSEE = Rule("oversee", _reach(operator=ALL, viewer=ALL, admin=OWN))
MANAGE = Rule("manage", _reach(operator=ALL, admin=OWN), changes=True, is_administrative=True)

_JOB = "/v1/jobs/{job}"
_NAME = f"{_JOB}/deployments/{{name}}"
_OPENAI = f"{_NAME}/openai"
_TRAJECTORY = f"{_OPENAI}/trajectories/{{trajectory}}"
_OPERATION = "/v1/operations/{operation:path}"
_ROLLOUTS = f"{_JOB}/rollouts"
_TINKER = "/api/v1"
_SAVED = f"{_TINKER}/training_runs/{{run}}/checkpoints"

ROWS: Mapping[str, Rule] = {
    # The cluster
    "GET /v1/health": OPEN,
    "GET /v1/metrics": OPEN,
    "GET /dashboard": OPEN,
    "GET /dashboard/": OPEN,
    "GET /dashboard/{path:path}": OPEN,
    "GET /v1/login": OPEN,
    "GET /v1/login/settings": OPEN,
    "GET /v1/login/callback": LOGIN,
    "POST /v1/login/refresh": LOGIN,
    "POST /v1/login/logout": LOGIN,
    "GET /v1/whoami": READ,
    "GET /v1/status": READ,
    "GET /v1/overview": READ,
    "GET /v1/overview/stream": READ,
    "GET /v1/lanes": READ,
    "GET /v1/queue": READ,
    "GET /v1/shares": READ,
    "GET /v1/usage": READ,
    "GET /v1/nodes": READ,
    "GET /v1/groups": OBSERVE,
    "POST /v1/nodes/{node}/drain": OPERATE,
    "POST /v1/nodes/{node}/undrain": OPERATE,
    "DELETE /v1/nodes/{node}": OPERATE,
    # Tenants, keys and the audit log
    "GET /v1/tenants": OBSERVE,
    "POST /v1/tenants": OPERATE,
    "GET /v1/tenants/{name}": OVERSEE,
    "PATCH /v1/tenants/{name}": OPERATE,
    "GET /v1/tenants/{name}/keys": OVERSEE,
    "POST /v1/tenants/{name}/keys": MANAGE,
    "DELETE /v1/tenants/{name}/keys/{key}": MANAGE,
    "GET /v1/audit": OVERSEE,
    # Jobs
    "GET /v1/jobs": READ,
    "POST /v1/jobs": CHANGE,
    "POST /v1/jobs/quote": READ,
    f"GET {_JOB}": READ,
    f"GET {_JOB}/explain": READ,
    f"GET {_JOB}/times": READ,
    f"GET {_JOB}/logs": READ,
    f"POST {_JOB}/finish": CHANGE,
    f"POST {_JOB}/heartbeat": REPEAT,
    f"POST {_JOB}/attach": CHANGE,
    f"GET {_JOB}/metrics": READ,
    f"POST {_JOB}/metrics": CHANGE,
    f"GET {_JOB}/samples": READ,
    f"GET {_JOB}/samples/{{step}}": READ,
    f"POST {_JOB}/samples": CHANGE,
    f"GET {_JOB}/checkpoints": READ,
    f"GET {_JOB}/checkpoints/{{name}}/files": READ,
    f"GET {_JOB}/checkpoints/{{name}}/files/{{path:path}}": READ,
    f"POST {_JOB}/checkpoints/{{name}}/share": CHANGE,
    f"DELETE {_JOB}/checkpoints/{{name}}": CHANGE,
    f"POST {_JOB}/keys": CHANGE_KEY,
    f"DELETE {_JOB}/keys": CHANGE_KEY,
    # Runs
    "GET /v1/runs": READ,
    "POST /v1/runs": CHANGE,
    "GET /v1/runs/{run}": READ,
    "GET /v1/runs/{run}/log": READ,
    "POST /v1/runs/{run}/stop": CHANGE,
    # Deployments
    f"POST {_JOB}/deployments": CHANGE,
    f"GET {_NAME}": READ,
    f"DELETE {_NAME}": CHANGE,
    f"POST {_NAME}/copies": CHANGE,
    f"PUT {_NAME}/parallelism": CHANGE,
    f"POST {_NAME}/recover": CHANGE,
    f"GET {_NAME}/tokenizer": READ,
    f"GET {_NAME}/text-files": READ,
    f"GET {_NAME}/engines": READ,
    f"POST {_NAME}/pause": CHANGE,
    f"POST {_NAME}/resume": CHANGE,
    f"POST {_NAME}/tp": CHANGE,
    # Operations
    f"POST {_NAME}/operations/{{kind}}": CHANGE,
    "GET /v1/operations": READ,
    f"GET {_OPERATION}": READ,
    f"GET {_OPERATION}/stream": READ,
    f"POST {_OPERATION}/acknowledge": CHANGE,
    f"POST {_OPERATION}/stop-rows": CHANGE,
    f"DELETE {_OPERATION}": CHANGE,
    # Asynchronous rollouts
    "GET /v1/rollouts": READ,
    f"GET {_ROLLOUTS}": READ,
    f"POST {_ROLLOUTS}": CHANGE,
    f"GET {_ROLLOUTS}/{{name}}": READ,
    f"GET {_ROLLOUTS}/{{name}}/profile": READ,
    f"POST {_ROLLOUTS}/{{name}}/exchange": REPEAT,
    f"POST {_ROLLOUTS}/{{name}}/batches/{{version}}": CHANGE,
    # OpenAI-compatible endpoints
    f"GET {_OPENAI}/v1/models": READ_MODEL,
    f"POST {_OPENAI}/v1/completions": INFER,
    f"POST {_OPENAI}/v1/chat/completions": INFER,
    f"GET {_TRAJECTORY}/v1/models": READ_MODEL,
    f"POST {_TRAJECTORY}/v1/completions": INFER,
    f"POST {_TRAJECTORY}/v1/chat/completions": INFER,
    f"GET {_TRAJECTORY}/captured": READ_MODEL,
    # The Tinker API
    f"GET {_TINKER}/healthz": READ,
    f"POST {_TINKER}/client/config": READ,
    f"POST {_TINKER}/client/dynamic_config": READ,
    f"POST {_TINKER}/telemetry": READ,
    f"GET {_TINKER}/get_server_capabilities": READ,
    f"POST {_TINKER}/create_session": CHANGE,
    f"POST {_TINKER}/session_heartbeat": REPEAT,
    f"POST {_TINKER}/sessions/{{session}}/finish": CHANGE,
    f"GET {_TINKER}/sessions": READ,
    f"GET {_TINKER}/sessions/{{session}}": READ,
    f"GET {_TINKER}/sessions/{{session}}/trace_export": READ,
    f"GET {_TINKER}/traces/{{name}}": OPEN,
    f"POST {_TINKER}/retrieve_future": REPEAT,
    f"POST {_TINKER}/retrieve_futures": REPEAT,
    f"POST {_TINKER}/cancel_future": CHANGE,
    f"POST {_TINKER}/create_model": CHANGE,
    f"POST {_TINKER}/get_info": READ,
    f"POST {_TINKER}/forward_backward": CHANGE,
    f"POST {_TINKER}/optim_step": CHANGE,
    f"POST {_TINKER}/save_weights": CHANGE,
    f"POST {_TINKER}/save_weights_for_sampler": CHANGE,
    f"POST {_TINKER}/load_weights": CHANGE,
    f"POST {_TINKER}/create_sampling_session": CHANGE,
    f"GET {_TINKER}/samplers/{{sampler}}": READ,
    f"POST {_TINKER}/asample": CHANGE,
    f"POST {_TINKER}/weights_info": READ,
    f"GET {_TINKER}/training_runs": READ,
    f"GET {_TINKER}/training_runs/{{run}}": READ,
    f"GET {_SAVED}": READ,
    f"GET {_TINKER}/checkpoints": READ,
    f"DELETE {_SAVED}/{{kind}}/{{name}}": CHANGE,
    f"PUT {_SAVED}/{{kind}}/{{name}}/ttl": CHANGE,
    **{
        f"{method} {_TINKER}/{{path:path}}": READ
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH")
    },
}
"""The rule of each route, by method and path."""


_OPEN: Final = [row.split(" ")[1] for row, rule in ROWS.items() if not rule.needs_key]
_OPEN_PATHS: Final = frozenset(
    (*_OPEN, "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json")
)
_OPEN_PREFIXES: Final = tuple(path.partition("{")[0] for path in _OPEN if "{" in path)


def needs_key(path: str) -> bool:
    """Whether a request's path is neither one of an open route nor of the API's description."""
    return path not in _OPEN_PATHS and not path.startswith(_OPEN_PREFIXES)
