"""Prints and writes the results of `plexrl simulate-rollout`."""

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from plexrl.cli.terminal.context import print_line, print_table, warn, write_text
from plexrl.errors import InvalidRequestError
from plexrl.sim.results.result_json import dumps
from plexrl.sim.rollout.report.histories import History
from plexrl.sim.rollout.results.bound import bounds
from plexrl.sim.rollout.results.gains import gain_lines, gain_over_sync
from plexrl.sim.rollout.results.outcome import RolloutOutcome
from plexrl.sim.rollout.setting import Setting
from plexrl.traces.io.files import write_whole

NEEDS = ("jinja2", "matplotlib")
"""Packages of the extra `simulator` that the report needs."""


def output(
    settings: Sequence[Setting],
    outcomes: Sequence[RolloutOutcome],
    histories: Sequence[History],
    out: Path | None,
    *,
    as_json: bool,
) -> None:
    """Print the results, and write them into the folder.

    Raises:
        InvalidRequestError: the folder cannot be written.
    """
    text = dumps(document(settings, outcomes))
    if as_json:
        write_text(text + "\n")
    else:
        for setting in settings:
            show(
                setting,
                [outcome for outcome in outcomes if outcome.limit == setting.workload.limit],
            )
        for line in (*bound_lines(settings, outcomes), *gain_lines(outcomes)):
            print_line(line)
    if out is not None:
        written = _write(settings, outcomes, histories, out, text)
        if not as_json:
            print_line("Written: " + ", ".join(map(str, written)))


def show(setting: Setting, outcomes: Sequence[RolloutOutcome]) -> None:
    """Print the runs of one limit as a table."""
    workload = setting.workload
    mean = sum(outcome.response_tokens for outcome in outcomes) / len(outcomes)
    print_line(
        f"{setting.gpus} GPUs, {setting.batch_groups} prompts of {workload.group_size} responses: "
        f"{mean:,.0f} tokens on average, at most {workload.limit:,}"
    )
    rows = []
    for outcome in outcomes:
        gain = gain_over_sync(outcome, outcomes)
        rows.append(
            (
                outcome.system.label,
                f"{outcome.system.rollout_gpus or setting.gpus}",
                f"{outcome.throughput:,.0f}",
                "" if gain is None else f"{gain:.2f}",
                f"{outcome.step_s:,.0f}",
                f"{outcome.staleness_mean:.1f} ≤{outcome.staleness_max}",
                f"{outcome.decode:.0%}",
                f"{outcome.prefill:.0%}",
                f"{outcome.train:.0%}",
            )
        )
    columns = ("system", "rollout GPUs", "tokens/s", "gain", "step s", "staleness")
    print_table("", (*columns, "decode", "prefill", "train"), rows)


def bound_lines(settings: Sequence[Setting], outcomes: Sequence[RolloutOutcome]) -> list[str]:
    """The throughput that no schedule exceeds, one sentence per limit."""
    return [
        f"at most {each.workload.limit:,} tokens: no split trains more than {bound:,.0f} tokens/s"
        for each, bound in zip(settings, bounds(settings, outcomes), strict=False)
    ]


def document(settings: Sequence[Setting], outcomes: Sequence[RolloutOutcome]) -> dict[str, object]:
    """The results as JSON values; equal questions give equal values except `speed`."""
    runs = [outcome.values() for outcome in outcomes]
    return {
        "version": version("plexrl"),
        "settings": [asdict(setting) for setting in settings],
        "gains_over_sync": [gain_over_sync(outcome, outcomes) for outcome in outcomes],
        "speed": [{"decision_ms": run.pop("decision_ms")} for run in runs],
        "runs": runs,
        "bounds": [
            {"limit": each.workload.limit, "throughput": bound}
            for each, bound in zip(settings, bounds(settings, outcomes), strict=False)
        ],
    }


def _write(
    settings: Sequence[Setting],
    outcomes: Sequence[RolloutOutcome],
    histories: Sequence[History],
    folder: Path,
    text: str,
) -> list[Path]:
    written = [folder / "results.json"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(written[0], text + "\n")
        missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
        if missing:
            warn(
                f"plexrl: no report.html, as {' and '.join(missing)} cannot be found: "
                "pip install 'plexrl[simulator]'"
            )
            return written
        from plexrl.sim.rollout.report.page import write_report

        written.append(write_report(settings, outcomes, histories, folder))
    except OSError as error:
        raise InvalidRequestError(f"cannot write to {folder}: {error}") from error
    return written
