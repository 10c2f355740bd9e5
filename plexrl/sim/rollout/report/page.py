"""Builds the HTML page."""

from collections.abc import Sequence
from pathlib import Path

from plexrl.sim.report.page import page_template
from plexrl.sim.report.tables import ReportTable
from plexrl.sim.report.units import percent
from plexrl.sim.rollout.engine.rewards import AT_ONCE, RewardCosts
from plexrl.sim.rollout.report.histories import (
    History,
    lane_plot,
    load_plot,
    staleness_plot,
)
from plexrl.sim.rollout.report.throughput import throughput_plot
from plexrl.sim.rollout.results.bound import bounds
from plexrl.sim.rollout.results.gains import gain_lines, gain_over_sync
from plexrl.sim.rollout.results.outcome import RolloutOutcome
from plexrl.sim.rollout.setting import ON_POLICY, Setting
from plexrl.traces.io.files import write_whole


def write_report(
    settings: Sequence[Setting],
    outcomes: Sequence[RolloutOutcome],
    histories: Sequence[History],
    folder: Path,
) -> Path:
    """Write `report.html` into `folder` and return its path. Equal runs give equal bytes.

    Raises:
        InvalidRequestError: matplotlib or jinja2 is not installed.
    """
    plots = (
        throughput_plot(outcomes),
        staleness_plot(histories),
        load_plot(histories),
        lane_plot(histories),
    )
    page = page_template("rollout.html.j2").render(
        title="Rollout and training, simulated",
        headline=[f"{line}." for line in gain_lines(outcomes)],
        setting_lines=setting_lines(settings, bounds(settings, outcomes)),
        runs=run_table(outcomes),
        plots=[plot for plot in plots if plot is not None],
    )
    path = folder / "report.html"
    write_whole(path, page)
    return path


def run_table(outcomes: Sequence[RolloutOutcome]) -> ReportTable:
    """One row per run."""
    columns = {
        "system": [outcome.system.label for outcome in outcomes],
        "limit": [f"{outcome.limit:,}" for outcome in outcomes],
        "rollout": [_rollout_gpus(outcome) for outcome in outcomes],
        "training": [f"{outcome.train_gpus}" for outcome in outcomes],
        "tokens/s": [f"{outcome.throughput:,.0f}" for outcome in outcomes],
        "gain": [_ratio(gain_over_sync(outcome, outcomes)) for outcome in outcomes],
        "s a step": [f"{outcome.step_s:,.0f}" for outcome in outcomes],
        "mean": [f"{outcome.staleness_mean:.2f}" for outcome in outcomes],
        "largest": [f"{outcome.staleness_max}" for outcome in outcomes],
        "decode": [percent(outcome.decode) for outcome in outcomes],
        "prefill": [percent(outcome.prefill) for outcome in outcomes],
        "pull": [percent(outcome.pull) for outcome in outcomes],
        "busy": [percent(outcome.train) for outcome in outcomes],
        "KV computed": [f"{outcome.prefills:.2f}" for outcome in outcomes],
        "preemptions": [f"{outcome.preemptions:.2f}" for outcome in outcomes],
    }
    limits = [outcome.limit for outcome in outcomes]
    return ReportTable(
        groups=(
            ("", 2),
            ("GPUs", 2),
            ("throughput", 3),
            ("staleness", 2),
            ("instances", 3),
            ("training", 1),
            ("per trajectory", 2),
        ),
        columns=tuple(columns),
        rows=tuple(zip(*columns.values(), strict=True)),
        breaks=frozenset(at for at in range(1, len(limits)) if limits[at] != limits[at - 1]),
    )


def setting_lines(
    settings: Sequence[Setting], bounds: Sequence[float] = ()
) -> list[tuple[str, str]]:
    """(name, value) of what all runs have in common; `bounds`: what no split of the GPUs exceeds,
    by setting."""
    first = settings[0]
    workload, costs = first.workload, first.costs
    limits = ", ".join(f"{setting.workload.limit:,}" for setting in settings)
    return [
        ("GPUs", f"{first.gpus}, {costs.gpus} for an instance"),
        ("batch", f"{first.batch_groups} prompts, {workload.group_size} responses each"),
        (
            "response lengths",
            f"{workload.scale:g} times {workload.lengths}, at most {limits} tokens",
        ),
        ("correlation within a prompt", f"{workload.correlation:g}"),
        ("KV cache of an instance", f"{costs.kv_tokens:,} tokens"),
        (
            "decode step",
            f"{costs.k1:g}·kv + max({costs.k2:g}, {costs.k3:g}·n) + {costs.k4:g} s",
        ),
        (
            "prefill of l tokens",
            f"{costs.prefill_s_per_token:g}·l + {costs.prefill_s_per_token2:g}·l² s",
        ),
        ("pull, push", f"{costs.pull_s:g} s, {costs.push_s:g} s"),
        ("training", f"{costs.train_gpu_s_per_token:g} GPU-s a token, {costs.train_fixed_s:g} s"),
        *(
            [("no split trains more than", ", ".join(f"{bound:,.0f} tokens/s" for bound in bounds))]
            if bounds
            else []
        ),
        ("rewards", _rewards(first.rewards)),
        ("steps", f"{first.steps}, of which {first.warmup_steps} to warm up"),
        ("seed", f"{workload.seed}"),
    ]


def _rollout_gpus(each: RolloutOutcome) -> str:
    return "all" if each.system.name in ON_POLICY else f"{each.system.rollout_gpus}"


def _rewards(costs: RewardCosts) -> str:
    if costs == AT_ONCE:
        return "at once"
    return f"{costs.usual_s:g} s, of {costs.slow_part:.1%} of the prompts {costs.slow_s:g} s"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
