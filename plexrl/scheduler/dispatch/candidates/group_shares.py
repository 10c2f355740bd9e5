"""Shares of a group's time: tenants that always have work waiting for one group get it in
proportion to their weights, whatever the lengths of their bursts and of the switches to them.

This is start-time fair queueing with the burst as its packet (Goyal et al., SIGCOMM 1996). While a
tenant contends for a group, it has a *share* there: the seconds that it held the group while others
waited, with the switches to it, divided by its weight. The tenant with the least share goes first;
the ordering rule (HRRS) decides among tenants of equal shares, and among the members of one tenant.
A tenant that begins to contend gets the least share of the others, and loses it once it has nothing
to run when the group is given away. So a job that pauses after each burst, as synchronous training
does, always comes with the least share, and the ordering rule alone decides among such jobs.

Two tenants' shares never differ by more than the longest burst with its switch, divided by the
weight of its tenant. So in any interval in which two tenants always have work waiting, their
seconds by weight differ by at most two such bursts. Not so across priority classes, beyond the
starvation bound, and where the slack guard holds a member back: these rules come before the share.

This module alone writes `Group.shares` and `Group.shared_at`.
"""

from typing import TYPE_CHECKING

from plexrl.scheduler.accounting.fair_shares import weight_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plexrl.ids import TenantId
    from plexrl.scheduler.rules.settings import Step
    from plexrl.scheduler.state.records import Deployment, Group


def settle_shares(
    step: "Step",
    group: "Group",
    contenders: "Sequence[Deployment]",
) -> None:
    """Bring the shares up to date before the group is given to one of `contenders`: its members
    that want it, among them the holder if it would go on. Some orderings heed no shares."""
    state, now = step.state, step.now
    if not contenders or not step.settings.ordering.shares_fairly:
        return
    since: dict[TenantId, float] = {}
    """When each tenant began to wait; of the holder's own tenant it is not used."""
    for contender in contenders:
        tenant = state.jobs[contender.job].tenant
        wants_since = contender.demand.burst.wants_since
        began = now if wants_since is None else wants_since
        since[tenant] = min(since.get(tenant, began), began)
    served_from, group.shared_at = group.shared_at, now
    if len(since) < 2:
        group.shares.clear()
        return
    kept = {tenant: share for tenant, share in group.shares.items() if tenant in since}
    least = min(kept.values(), default=0.0)
    group.shares = {tenant: kept.get(tenant, least) for tenant in since}
    if group.holder is None:
        return
    holder = state.jobs[state.deployments[group.holder].job].tenant
    if holder in since:
        # Time in which nobody else waited takes nothing from others.
        others = min([began for tenant, began in since.items() if tenant != holder])
        served_s = max(0.0, now - max(served_from, others))
        group.shares[holder] += served_s / weight_of(state, holder)


def settle_all(
    step: "Step",
    groups: "Sequence[Group]",
    contenders: "Sequence[Deployment]",
) -> None:
    """As `settle_shares`, for all groups of a holder."""
    for group in groups:
        there = contenders
        if len(groups) > 1:
            there = [
                contender for contender in contenders if group.group in contender.placement.groups
            ]
        settle_shares(step, group, there)


def share_of(group: "Group", tenant: "TenantId") -> float:
    """The tenant's share of the group; of one that has just begun to contend the least."""
    shares = group.shares
    if not shares:
        return 0.0
    share = shares.get(tenant)
    return min(shares.values()) if share is None else share
