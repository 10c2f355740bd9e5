"""`plexrl status`: what is wrong, then the cluster in a few numbers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from plexrl.cli.terminal.context import (
    Access,
    Output,
    local_time,
    print_line,
    print_table,
    write_json,
)
from plexrl.cli.terminal.option_groups import with_option_groups

if TYPE_CHECKING:
    from plexrl.wire.messages.cluster_views import (
        BrokerView,
        EtaQualityView,
        PartView,
        StatusView,
    )

PROBLEMS_MAX = 8
"""Most problems that are shown, so that the numbers below them stay on the screen."""


class StatusProblem(NamedTuple):
    """One thing that is wrong."""

    code: str
    since: float | None
    """Seconds since the epoch; None: unknown."""
    what: str
    """Empty: only operators may read it."""


@with_option_groups
def status(access: Access, output: Output) -> None:
    """What is wrong with the cluster, then the cluster in a few numbers."""
    with access.open() as cluster:
        found = cluster.status()
    if output.as_json:
        write_json(found)
        return
    show_status(found)


def show_status(found: "StatusView") -> None:
    """Print the problems and the numbers; they fit a screen."""
    wrong = list(problems(found))
    if wrong:
        rows = [_row(problem) for problem in wrong[:PROBLEMS_MAX]]
        print_table("", ("wrong now", "since", "what"), rows)
        if len(wrong) > PROBLEMS_MAX:
            print_line(f"{len(wrong) - PROBLEMS_MAX} more: plexrl status --json")
    else:
        print_line("Nothing is wrong.")
    print_table("The cluster", ("what", "value"), list(_numbers(found)))


def problems(found: "StatusView") -> Iterator[StatusProblem]:
    """What is wrong with the cluster, as `plexrl status` and `plexrl doctor` say it."""
    for condition in found["conditions"]:
        yield StatusProblem(condition["code"], condition["since"], condition.get("message", ""))
    for name, part in found.get("parts", {}).items():
        since = part["down_since"] or part["stuck_since"]
        if since is not None:
            state = "has ended" if part["down_since"] else "does not answer"
            yield StatusProblem("part", since, f"{name} {state}")
    if impossible := found["deployments_impossible"]:
        what = f"{impossible} deployments ask for more than the nodes in service can give"
        yield StatusProblem("impossible", None, f"{what}; plexrl explain JOB")
    if error := found.get("snapshot_error"):
        yield StatusProblem("snapshot_error", None, error)
    broker = found.get("events")
    if broker is not None and not broker["connected"]:
        yield StatusProblem(
            "event_broker", None, f"not connected: {broker['error'] or 'not tried yet'}"
        )


def _row(problem: StatusProblem) -> tuple[str, str, str]:
    since = "" if problem.since is None else local_time(problem.since)
    return problem.code, since, problem.what


def _numbers(found: "StatusView") -> Iterator[tuple[str, str]]:
    yield "nodes", f"{found['nodes']}, routers {found['routers']}"
    # Their difference would not be what is free: groups keep the GPUs of a lost node, which are not
    # among the first, and a node that drains gives none. `plexrl top` has the states.
    yield "GPUs", f"{found['gpus']}, in groups {found['gpus_reserved']}"
    if "tenants" in found:
        yield "tenants", str(found["tenants"])
    yield "jobs", f"{found['jobs_live']} live, {found['jobs_total']} in all"
    yield "deployments waiting", str(found["deployments_waiting"])
    yield "deployments over slo", str(found["deployments_over_slo"])
    yield "deployments held", str(len(found["held"]))
    yield "operations", f"{found['operations_pending']} pending, {_finished(found)}"
    yield "estimated starts in their 80 % interval", _inside(found["eta_quality"])
    yield "parts restarted", _restarts(found)
    for name, part in found.get("parts", {}).items():
        yield f"restarts of {name}", _restarts(part)
    if skipped := found.get("steps_set_aside"):
        yield "steps set aside", f"{skipped}, the newest {found.get('newest_set_aside', '')}"
    if broker := found.get("events"):
        yield "event broker", _broker(broker)


def _finished(found: "StatusView") -> str:
    switches = found.get("context_switches")
    rest = "" if switches is None else f", {switches} context switches"
    return f"{found['operations_finished']} finished{rest}"


def _inside(quality: "EtaQualityView") -> str:
    if not quality["estimates"]:
        return "none verified yet"
    inside = quality["estimates"] - quality["early"] - quality["late"]
    return f"{inside} of {quality['estimates']}"


def _broker(events: "BrokerView") -> str:
    counts = f"{events['sent']} sent, {events['queued']} waiting, {events['dropped']} dropped"
    return f"{'connected' if events['connected'] else 'not connected'}: {counts}"


def _restarts(of: "StatusView | PartView") -> str:
    count, last_at = of["restarts"], of["last_restart_at"]
    return f"{count}, the last at {local_time(last_at)}" if last_at is not None else str(count)
