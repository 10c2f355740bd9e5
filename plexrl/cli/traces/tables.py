"""The tables of `plexrl traces`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from plexrl.cli.terminal.context import print_table, seconds

if TYPE_CHECKING:
    from plexrl.traces.describe import JobsDescription, LengthsDescription

LABELS = {"gpus": "gpus + rollout_gpus"}
"""Labels of quantities that are not columns of the trace."""
UNITS = ("p50", "p90", "p99", "max", "mean")


def print_description(title: str, description: "JobsDescription | LengthsDescription") -> None:
    """Print the result of `describe_jobs` or `describe_lengths`."""
    if description["table"] == "jobs":
        facts = [
            ("jobs", f"{description['jobs']:,}"),
            ("arrivals over", seconds(description["arrivals_s"])),
            ("GPU-hours with rollouts", f"{description['gpu_hours']:,.0f}"),
            ("tenants", f"{description['tenants']:,}"),
        ]
        if "offered_load" in description:
            facts.append(("offered load", f"{description['offered_load']:.2f}"))
        for name, counts in (
            ("models", description["models"]),
            ("outcomes", description["outcomes"]),
        ):
            texts = (f"{key or 'unknown'} {count:,}" for key, count in counts.items())
            facts.append((name, ", ".join(texts)))
    else:
        facts = [
            ("responses", f"{description['responses']:,}"),
            ("with a group", f"{description['grouped']:,}"),
        ]
    print_table(title, ("", ""), facts)
    print_table(
        "Quantities",
        ("", *UNITS),
        (
            (LABELS.get(name, name), *(_shown(name, values[unit]) for unit in UNITS))
            for name, values in description["quantities"].items()
        ),
    )
    if description["table"] == "jobs" and description["sizes"]:
        print_table(
            "Sizes",
            ("", "jobs", "GPU-hours"),
            (
                (row["size"], f"{row['jobs']:,}", f"{row['gpu_hours']:,.0f}")
                for row in description["sizes"]
            ),
        )


def print_distributions(found: Iterable[tuple[str, str, float | None]]) -> None:
    """Print distributions and their Kolmogorov distances from the sample."""
    print_table(
        "Distributions",
        ("of", "distribution", "distance"),
        ((of, text, "" if off is None else f"{off:.3f}") for of, text, off in found),
    )


def _shown(name: str, value: float) -> str:
    if name.endswith("_s"):
        return seconds(value)
    return f"{value:.3f}" if name == "duty" else f"{value:,.0f}"
