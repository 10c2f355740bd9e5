"""What the router tells the scheduler about its callers."""

from plexrl.router.http.authentication import Caller
from plexrl.scheduler.core.calls import take_scope


def test_a_callers_claim_is_the_scope_that_the_scheduler_reads() -> None:
    for caller in (Caller("a", is_operator=False), Caller("operator", is_operator=True)):
        assert take_scope({**caller.claim, "job": "j"}) == (caller.scope, {"job": "j"})
