"""Cache of deployments' specifications. Only a rollout's layout changes, with its workers."""

import asyncio
from collections import OrderedDict
from typing import Any, NamedTuple

from plexrl.errors import StorageError, UnavailableError
from plexrl.model.deployment_spec import DeploymentSpec, deployment_spec_from_json
from plexrl.router.execution.scheduler_link import SchedulerLink
from plexrl.wire import scheduler_methods as m

SPECS_MAX = 10_000
RETRY_S = 0.2


class OwnedSpec(NamedTuple):
    """A specification, and the tenant whose deployment it describes."""

    spec: DeploymentSpec
    tenant: str


class DeploymentSpecs:
    """A bounded cache with separate entries for every scope, so that no tenant reads another's."""

    def __init__(self, scheduler: SchedulerLink) -> None:
        self._scheduler = scheduler
        self._specs: OrderedDict[tuple[str, str | None, int], OwnedSpec] = OrderedDict()

    async def read(self, deployment: str, scope: str | None, incarnation: int = 0) -> OwnedSpec:
        """Return a specification in the scope of a tenant, or in every scope (None): that of an
        incarnation of its workers, or with any of its layouts.

        Raises:
            UnknownDeploymentError: the scope has no such deployment.
            UnavailableError: no scheduler is connected.
        """
        key = (deployment, scope, incarnation)
        found = self._specs.get(key)
        if found is None:
            claim: dict[str, Any] = {"tenant": scope}
            if scope is None:
                claim["as_operator"] = True
            view = await self._scheduler.call(m.GET_DEPLOYMENT, {"deployment": deployment, **claim})
            found = OwnedSpec(deployment_spec_from_json(view["spec_json"]), view["tenant"])
            self._specs[key] = found
            while len(self._specs) > SPECS_MAX:
                self._specs.popitem(last=False)
        return found

    def cached(self, deployment: str, incarnation: int) -> OwnedSpec | None:
        """Return the specification of workers whose runs this router has executed; None if it is no
        longer known."""
        return self._specs.get((deployment, None, incarnation))

    async def await_own(self, deployment: str, incarnation: int) -> OwnedSpec:
        """Return the specification of workers whose run this router executes. While the scheduler
        is unreachable the call waits: the run outlives a restart of the scheduler.

        Raises:
            UnknownDeploymentError: the deployment was deleted meanwhile.
        """
        while True:
            try:
                return await self.read(deployment, None, incarnation)
            except (UnavailableError, StorageError):
                await asyncio.sleep(RETRY_S)
