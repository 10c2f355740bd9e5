"""The demo's live view: state of each job, holder of the group, rewards so far."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from plexrl.cli.terminal.sparkline import sparkline

PLAIN_PERIOD_S = 5.0


@dataclass(slots=True, kw_only=True)
class JobLine:
    """The latest state of one job."""

    name: str
    tenant: str
    job: str | None = None
    state: str = "starting"
    residency: str = ""
    step: int = 0
    steps: int = 0
    rewards: list[float] = field(default_factory=list)
    reward_before: float | None = None
    reward_after: float | None = None
    gpus: set[tuple[str, int]] = field(default_factory=set)
    """Node and index of all GPUs that its deployments were seen on."""


@dataclass(slots=True, kw_only=True)
class Screen:
    """The contents of one frame."""

    title: str
    started_at: float
    jobs: list[JobLine]
    groups: Sequence[Mapping[str, Any]] = ()


class DemoView:
    """A live panel on a terminal, otherwise a line every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._last_plain = float("-inf")
        if console.is_terminal:
            self._live = Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "DemoView":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, screen: Screen) -> None:
        """Draw a frame."""
        if self._live is not None:
            self._live.update(render(screen))
        elif time.monotonic() - self._last_plain >= PLAIN_PERIOD_S:
            self._last_plain = time.monotonic()
            self._console.print(plain_line(screen), highlight=False, soft_wrap=True)


def render(screen: Screen) -> RenderableType:
    """The panel of one frame."""
    table = Table(expand=True, box=None)
    for column in ("job", "tenant", "state", "now", "progress", "reward"):
        table.add_column(column, no_wrap=True)
    for line in screen.jobs:
        progress = Table.grid(padding=(0, 1))
        progress.add_row(
            ProgressBar(total=max(1, line.steps), completed=line.step, width=20),
            f"{line.step}/{line.steps}" if line.steps else "",
        )
        recent = f"{line.rewards[-1]:.3f} " if line.rewards else ""
        table.add_row(
            Text(line.name, style="bold"),
            line.tenant,
            line.state,
            line.residency,
            progress,
            Text(recent + sparkline(line.rewards), style="green"),
        )
    elapsed = time.time() - screen.started_at
    lines = [group_line(group, screen.jobs) for group in screen.groups]
    return Panel(
        Group(table, *(Text(line) for line in lines)), title=f"{screen.title} · {elapsed:.0f} s"
    )


def group_line(group: Mapping[str, Any], jobs: Sequence[JobLine]) -> str:
    """The holder of a shared group and the cost of its switches."""
    names = {line.job: line.name for line in jobs}
    holder = str(group["holder"] or "")
    owner = names.get(holder.rsplit("/", 1)[0], holder) or "nobody"
    return (
        f"group {group['group']}: held by {owner} ({group['phase']}), "
        f"{group['switches']} switches, {group['switch_seconds']:.1f} s in them"
    )


def plain_line(screen: Screen) -> str:
    """One line for logs and pipes."""
    jobs = ", ".join(
        f"{line.name} {line.step}/{line.steps or '?'}"
        + (f" reward {line.rewards[-1]:.3f}" if line.rewards else f" {line.state}")
        for line in screen.jobs
    )
    switches = sum(int(group["switches"]) for group in screen.groups)
    elapsed = time.time() - screen.started_at
    return f"{screen.title}: {elapsed:4.0f} s, {jobs}, {switches} context switches"
