"""Identifiers: one type each, so that a job id never stands where a WPG id belongs."""

from typing import NewType

TenantId = NewType("TenantId", str)
JobId = NewType("JobId", str)
DeploymentId = NewType("DeploymentId", str)
"""`<job id>/<deployment name>`. A deployment is realised by one worker-process group (WPG)."""
OperationId = NewType("OperationId", str)
"""Chosen by the client, so that a retried submission names the same operation."""
NodeId = NewType("NodeId", str)
GroupId = NewType("GroupId", str)
"""A node group: the set of GPUs that WPGs take turns on."""
RouterId = NewType("RouterId", str)
BlobRef = NewType("BlobRef", str)
"""Name of an immutable payload or result in the blob store."""
FencingToken = NewType("FencingToken", int)
"""Grows with every grant of a group's lock (PlexRL §5.2.3); a smaller one is a former holder's."""
