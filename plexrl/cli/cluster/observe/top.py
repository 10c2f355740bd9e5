"""`plexrl top`: the cluster and its queues, refreshed in place at a terminal."""

import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plexrl.cli.terminal.context import (
    Access,
    Output,
    plain_cell,
    print_line,
    print_table,
    seconds,
    styled_line,
    write_json,
)
from plexrl.cli.terminal.option_groups import with_option_groups
from plexrl.errors import ConnectionLostError, OverloadedError, UnavailableError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from plexrl.client.blocking.cluster import Cluster
    from plexrl.wire.messages.overview_views import ClusterOverview, QueuedView

STATES = {
    "computing": ("█", "blue"),
    "switching": ("▓", "yellow"),
    "idle": ("▒", "cyan"),
    "others": ("░", "white"),
    "free": ("·", "bright_black"),
    "draining": ("-", "magenta"),
    "lost": ("x", "red"),
}
"""Sign and colour of each state; the colour only repeats what the sign says."""
BAR = 60
QUEUE = ("#", "job", "tenant", "waits for", "since", "rule", "behind", "starts in")
Rows = list[tuple[str, ...]]

PASSING = (ConnectionLostError, UnavailableError, OverloadedError)
"""Errors of a look after which the next one may succeed."""


@with_option_groups
def top(
    interval: Annotated[
        float, typer.Option(min=1.0, max=3600.0, help="Seconds between two looks, at a terminal.")
    ] = 2.0,
    rows: Annotated[int, typer.Option(min=1, max=50, help="Rows of each queue.")] = 10,
    *,
    access: Access,
    output: Output,
) -> None:
    """GPUs by state, and what waits, why and until when; at a terminal until Ctrl-C."""
    with access.open() as cluster:
        if output.as_json:
            write_json(_look(cluster, rows))
        elif sys.stdout.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown"):
            _follow(cluster, interval, rows)
        else:
            _print(*_look(cluster, rows).values())


def _look(cluster: "Cluster", rows: int) -> dict[str, Any]:
    """The overview, and the first rows of both queues."""
    return {
        "overview": cluster.overview(),
        "turns": cluster.queue("turns", limit=rows)["rows"],
        "gpus": cluster.queue("gpus", limit=rows)["rows"],
    }


def _print(view: "ClusterOverview", turns: "list[QueuedView]", gpus: "list[QueuedView]") -> None:
    for line in _lines(view):
        print_line(line)
    for title, found in (("Wait for their turn", turns), ("Wait for GPUs", gpus)):
        if found:
            print_table(title, QUEUE, _rows(found, view["now"]))


def _follow(cluster: "Cluster", interval_s: float, rows: int) -> None:
    """Refresh the screen. A look that fails is said above the last one that did not, and the next
    is tried: a cluster whose router starts again is the one to look at."""
    from rich.console import Group
    from rich.live import Live

    last: RenderableType = _screen(*_look(cluster, rows).values())
    shown = last
    with Live(shown, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(shown, refresh=True)
                time.sleep(interval_s)
                try:
                    last = shown = _screen(*_look(cluster, rows).values())
                except PASSING as error:
                    shown = Group(plain_cell(f"not refreshed since then: {error}"), last)
        except KeyboardInterrupt:
            return


def _screen(
    view: "ClusterOverview", turns: "list[QueuedView]", gpus: "list[QueuedView]"
) -> "RenderableType":
    from rich.console import Group
    from rich.table import Table

    parts: list[RenderableType] = [plain_cell(line) for line in _lines(view)]
    parts.insert(1, _bar(view))
    for title, found in (("Wait for their turn", turns), ("Wait for GPUs", gpus)):
        table = Table(*QUEUE, title=title, title_justify="left", box=None)
        for row in _rows(found, view["now"]):
            table.add_row(*map(plain_cell, row))
        if found:
            parts.append(table)
    return Group(*parts)


def _bar(view: "ClusterOverview") -> "RenderableType":
    """The GPUs by state, in `BAR` signs."""
    total, parts = view["gpus"]["gpus"], []
    shown = end = 0
    for state, (sign, colour) in STATES.items():
        end += view["gpus"]["states"].get(state, 0)
        wide = round(BAR * end / total) - shown if total else 0
        parts.append((sign * wide, colour))
        shown += wide
    return styled_line(parts)


def _lines(view: "ClusterOverview") -> Iterator[str]:
    states, total = view["gpus"]["states"], view["gpus"]["gpus"]
    shares = [
        f"{sign} {name} {states[name]}" for name, (sign, _) in STATES.items() if name in states
    ]
    yield f"{total} GPUs on {view['nodes']} nodes: {', '.join(shares) or 'no node has joined'}"
    waits = [
        f"{view['waiting']} for GPUs{_oldest(view['waiting_since'], view['now'])}",
        f"{view['turns']} for a turn{_oldest(view['turns_since'], view['now'])}",
        f"{view['impossible']} impossible",
    ]
    yield f"{view['jobs_live']} live jobs; deployments that wait: {', '.join(waits)}"
    for each in view["conditions"]:
        since = seconds(max(0.0, time.time() - each["since"]))
        yield f"{each['code']} for {since}: {each.get('message', '')} (plexrl doctor)"


def _oldest(since: float | None, now: float) -> str:
    return "" if since is None else f" (the longest {seconds(now - since)})"


def _rows(found: "list[QueuedView]", now: float) -> Rows:
    return [
        (
            str(each["position"]),
            each["job"],
            each["tenant"],
            f"{each['kind']}, {each['gpus']} GPUs",
            seconds(now - each["since"]),
            each["rule"],
            each["blocker"] or "",
            _start(each),
        )
        for each in found
    ]


def _start(each: "QueuedView") -> str:
    """The expected start, with its interval."""
    low_s, high_s = each["eta_low_s"], each["eta_high_s"]
    if low_s is None or high_s is None:
        return seconds(each["eta_s"])
    return f"{seconds(each['eta_s'])} ({seconds(max(0.0, low_s))} - {seconds(high_s)})"
