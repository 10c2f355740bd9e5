"""The paths of the HTTP API are stable."""

from fastapi.routing import APIRoute

from plexrl.router.http.routes import cluster, deployments, jobs, operations, rollouts, streams

PATHS = """
DELETE /v1/jobs/{job}/checkpoints/{name}
DELETE /v1/jobs/{job}/deployments/{name}
DELETE /v1/nodes/{node}
DELETE /v1/operations/{operation:path}
DELETE /v1/tenants/{name}/keys/{key}
GET /v1/groups
GET /v1/health
GET /v1/jobs
GET /v1/jobs/{job}
GET /v1/jobs/{job}/checkpoints
GET /v1/jobs/{job}/checkpoints/{name}/files
GET /v1/jobs/{job}/checkpoints/{name}/files/{path:path}
GET /v1/jobs/{job}/deployments/{name}
GET /v1/jobs/{job}/deployments/{name}/engines
GET /v1/jobs/{job}/deployments/{name}/text-files
GET /v1/jobs/{job}/deployments/{name}/tokenizer
GET /v1/jobs/{job}/explain
GET /v1/jobs/{job}/logs
GET /v1/jobs/{job}/metrics
GET /v1/jobs/{job}/samples
GET /v1/jobs/{job}/samples/{step}
GET /v1/metrics
GET /v1/nodes
GET /v1/operations
GET /v1/operations/{operation:path}
GET /v1/operations/{operation:path}/stream
GET /v1/status
GET /v1/tenants
GET /v1/tenants/{name}/keys
GET /v1/usage
PATCH /v1/tenants/{name}
POST /v1/jobs
POST /v1/jobs/{job}/attach
POST /v1/jobs/{job}/deployments
POST /v1/jobs/{job}/deployments/{name}/copies
POST /v1/jobs/{job}/deployments/{name}/operations/{kind}
POST /v1/jobs/{job}/deployments/{name}/pause
POST /v1/jobs/{job}/deployments/{name}/recover
POST /v1/jobs/{job}/deployments/{name}/resume
POST /v1/jobs/{job}/deployments/{name}/tp
POST /v1/jobs/{job}/finish
POST /v1/jobs/{job}/heartbeat
POST /v1/jobs/{job}/metrics
POST /v1/jobs/{job}/samples
POST /v1/nodes/{node}/drain
POST /v1/nodes/{node}/undrain
POST /v1/operations/{operation:path}/acknowledge
POST /v1/operations/{operation:path}/stop-rows
POST /v1/tenants
POST /v1/tenants/{name}/keys
PUT /v1/jobs/{job}/deployments/{name}/parallelism
"""


def test_the_api_has_these_routes() -> None:
    found = [
        f"{method} {route.path}"
        for subject in (cluster, deployments, jobs, operations, rollouts, streams)
        for route in subject.ROUTES.routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    ]
    assert sorted(found) == PATHS.split("\n")[1:-1]
