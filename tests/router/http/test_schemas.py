"""Request bodies with out-of-range numbers are refused."""

import math
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from plexrl.router.http.schemas import (
    DeploymentRequest,
    ForkRequest,
    JobRequest,
    LoraRequest,
    MetricsRequest,
)

JOB = {"job": "j", "name": "j"}
DEPLOYMENT = {"name": "d", "kind": "train", "model": {}}


@pytest.mark.parametrize(
    ("request_type", "valid", "changes"),
    [
        *(
            (JobRequest, JOB, {name: value})
            for name in ("controller_timeout_s", "reattach_timeout_s", "expected_s", "gang")
            for value in (math.nan, math.inf, -1, 1e300)
        ),
        (DeploymentRequest, DEPLOYMENT, {"workers": 1 << 40}),
        (DeploymentRequest, DEPLOYMENT, {"kv_cache_bytes": 1 << 70}),
        (MetricsRequest, {"step": 1, "values": {}}, {"step": 1 << 70}),
        (LoraRequest, {"rank": 1}, {"rank": 1 << 40}),
        (ForkRequest, {"job": "j", "step": 1}, {"step": 1 << 70}),
    ],
)
def test_an_out_of_range_number_is_refused(
    request_type: type[BaseModel], valid: dict[str, Any], changes: dict[str, Any]
) -> None:
    request_type.model_validate(valid)
    with pytest.raises(ValidationError, match=next(iter(changes))):
        request_type.model_validate({**valid, **changes})
