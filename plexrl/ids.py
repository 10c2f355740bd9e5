"""Identifiers: one type for each, so that a type check finds mixed-up ids."""

from typing import NewType

TenantId = NewType("TenantId", str)
JobId = NewType("JobId", str)
DeploymentId = NewType("DeploymentId", str)
"""`<job id>/<deployment name>`. One worker-process group (WPG) runs each deployment."""
OperationId = NewType("OperationId", str)
"""Chosen by the client, so that a retried submission has the same id."""
NodeId = NewType("NodeId", str)
GroupId = NewType("GroupId", str)
"""A node group: a set of GPUs that WPGs share in turn."""
RouterId = NewType("RouterId", str)
BlobRef = NewType("BlobRef", str)
"""Name of an immutable payload or result in the blob store."""
FencingToken = NewType("FencingToken", int)
"""Grows with every grant of a group's lock (PlexRL §5.2.3); a smaller token is outdated."""
