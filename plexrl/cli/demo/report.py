"""The demo's report: `report.json`, `report.html` and its plots."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plexrl.cli.demo.measure import SWITCH_KINDS, DemoSpan, PhaseResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#2a6fbb", "#d9822b", "#3d9a50", "#8e5bb5")
SWITCH_COLOUR = "#444444"
HOUR_PRICE = 2.5
"""$ a GPU-hour, as the simulator's H200 costs."""
STEPS_PRICED = 1000
FIGURES = (
    *("gpu_seconds_per_step", "gpus"),
    *("worker_seconds_per_step", "worker_seconds", "wall_seconds", "busy_share"),
    *("groups", "context_switches", "switch_seconds"),
)
"""The figures of a phase in `report.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The data of the report."""

    shared: PhaseResult
    isolated: PhaseResult | None
    """Absent without the isolated baseline."""
    machine: str
    versions: str


def write_report(result: DemoResult, folder: Path) -> Path:
    """Write all files of the report into `folder`; returns the path of the HTML page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report_json(result), indent=2) + "\n")
    plot_timeline(result.shared, folder / "timeline.png")
    plot_rewards(result, folder / "rewards.png")
    page = folder / "report.html"
    page.write_text(render_page(result))
    return page


def report_json(result: DemoResult) -> dict[str, object]:
    """The figures for programs."""
    body: dict[str, object] = {
        "jobs": [
            {
                "name": job.name,
                "tenant": job.tenant,
                "reward_before": job.reward_before,
                "reward_after": job.reward_after,
                "steps": job.steps,
            }
            for job in result.shared.jobs
        ],
        "shared": phase_json(result.shared),
        "machine": result.machine,
        "versions": result.versions,
    }
    if result.isolated is not None:
        body["isolated"] = phase_json(result.isolated)
        body["saving"] = saving(result.shared, result.isolated)
        body["saving_of_all_gpus"] = saving_of_all_gpus(result.shared, result.isolated)
        body["same_rewards"] = same_rewards(result.shared, result.isolated)
        body["same_weights"] = same_weights(result.shared, result.isolated)
    return body


def phase_json(phase: PhaseResult) -> dict[str, object]:
    """One phase's figures."""
    return {
        **{name: getattr(phase, name) for name in FIGURES},
        "jobs": [
            {
                "name": job.name,
                "seconds": job.ended_at - job.submitted_at,
                "reward_before": job.reward_before,
                "reward_after": job.reward_after,
                "weights": job.weights,
            }
            for job in phase.jobs
        ],
    }


def saving(shared: PhaseResult, isolated: PhaseResult) -> float:
    """Part of the isolated reservation of training GPUs that sharing saves."""
    return 1.0 - shared.worker_seconds_per_step / isolated.worker_seconds_per_step


def saving_of_all_gpus(shared: PhaseResult, isolated: PhaseResult) -> float:
    """The same of training and rollout GPUs together."""
    return 1.0 - shared.gpu_seconds_per_step / isolated.gpu_seconds_per_step


def same_rewards(shared: PhaseResult, isolated: PhaseResult) -> bool:
    """Whether every step of every job has exactly the same reward in both modes."""
    alone = {job.name: [(step, reward) for step, _, reward in job.rewards] for job in isolated.jobs}
    together = {
        job.name: [(step, reward) for step, _, reward in job.rewards] for job in shared.jobs
    }
    return alone == together


def same_weights(shared: PhaseResult, isolated: PhaseResult) -> bool:
    """Whether each job ended with exactly the same weights in both modes."""
    return {job.name: job.weights for job in shared.jobs} == {
        job.name: job.weights for job in isolated.jobs
    }


def plot_timeline(phase: PhaseResult, path: Path, *, label: str = "") -> None:
    """Plot the holders of the shared group: the whole run above, a few cycles below. `label` stands
    before each title."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (whole, detail) = plt.subplots(2, 1, figsize=(11, 5.2), constrained_layout=True)
    start = min((span.start for span in phase.spans), default=0.0)
    end = max((span.end for span in phase.spans), default=1.0)
    names = [job.name for job in phase.jobs]
    _draw_spans(whole, phase.spans, names, start)
    whole.set_xlim(0, end - start)
    whole.set_title(label + "Who held the shared training group", loc="left")
    middle = (end - start) * 0.5
    _draw_spans(detail, phase.spans, names, start)
    detail.set_xlim(middle, middle + min(4.0, end - start))
    detail.set_title(label + "Four seconds of it", loc="left")
    detail.set_xlabel("seconds")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS[: len(names)]]
    handles.append(plt.Rectangle((0, 0), 1, 1, color=SWITCH_COLOUR))
    whole.legend(
        handles,
        [*names, "context switch"],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(handles),
        frameon=False,
    )
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_spans(
    axes: "Axes", spans: Sequence[DemoSpan], names: Sequence[str], start: float
) -> None:
    for index, name in enumerate(names):
        for switching, colour in ((False, COLOURS[index % len(COLOURS)]), (True, SWITCH_COLOUR)):
            bars = [
                (span.start - start, span.end - span.start)
                for span in spans
                if span.job == name and (span.kind in SWITCH_KINDS) == switching
            ]
            axes.broken_barh(bars, (index - 0.4, 0.8), facecolors=colour, linewidth=0)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.6, len(names) - 0.4)


def plot_rewards(result: DemoResult, path: Path) -> None:
    """Plot the mean reward of each step over the time since submission."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 4), constrained_layout=True)
    phases = [(result.shared, "-")] + ([(result.isolated, ":")] if result.isolated else [])
    for phase, style in phases:
        for index, job in enumerate(phase.jobs):
            seconds = [at for _, at, _ in job.rewards]
            rewards = [reward for _, _, reward in job.rewards]
            axes.plot(
                seconds,
                rewards,
                style,
                color=COLOURS[index % len(COLOURS)],
                label=f"{job.name}, {phase.name}",
            )
    axes.set(xlabel="seconds since submission", ylabel="mean reward of a step", ylim=(0, 1.02))
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def render_page(result: DemoResult) -> str:
    """The HTML page, which refers to the plots in the same folder."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("plexrl.cli.demo"), autoescape=True, undefined=StrictUndefined
    )
    isolated = result.isolated
    return environment.get_template("report.html.j2").render(
        shared=result.shared,
        isolated=isolated,
        saving=saving(result.shared, isolated) if isolated else None,
        saving_of_all_gpus=saving_of_all_gpus(result.shared, isolated) if isolated else None,
        same_rewards=same_rewards(result.shared, isolated) if isolated else None,
        same_weights=same_weights(result.shared, isolated) if isolated else None,
        hour_price=HOUR_PRICE,
        steps_priced=STEPS_PRICED,
        costs={
            phase.name: phase.gpu_seconds_per_step * STEPS_PRICED / 3600 * HOUR_PRICE
            for phase in (result.shared, *([isolated] if isolated else []))
        },
        machine=result.machine,
        versions=result.versions,
    )
