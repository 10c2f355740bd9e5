"""The tables of `plexrl traces`."""

from collections.abc import Iterable
from typing import Any

from plexrl.cli.terminal.context import print_table, seconds

LABELS = {"gpus": "gpus + rollout_gpus"}
"""Labels of quantities that are not columns of the trace."""
UNITS = ("p50", "p90", "p99", "max", "mean")


def print_description(title: str, found: dict[str, Any]) -> None:
    """Print the result of `describe_jobs` or `describe_lengths`."""
    if found["table"] == "jobs":
        facts = [
            ("jobs", f"{found['jobs']:,}"),
            ("arrivals over", seconds(found["arrivals_s"])),
            ("GPU-hours with rollouts", f"{found['gpu_hours']:,.0f}"),
            ("tenants", found["tenants"]),
        ]
        if "offered_load" in found:
            facts.append(("offered load", f"{found['offered_load']:.2f}"))
        for name in ("models", "outcomes"):
            named = {key or "unknown": count for key, count in found[name].items()}
            facts.append((name, ", ".join(f"{key} {count:,}" for key, count in named.items())))
    else:
        facts = [
            ("responses", f"{found['responses']:,}"),
            ("with a group", f"{found['grouped']:,}"),
        ]
    print_table(title, ("", ""), facts)
    print_table(
        "Quantities",
        ("", *UNITS),
        (
            (LABELS.get(name, name), *(_shown(name, values[unit]) for unit in UNITS))
            for name, values in found["quantities"].items()
        ),
    )
    if found.get("sizes"):
        print_table(
            "Sizes",
            ("", "jobs", "GPU-hours"),
            (
                (row["size"], f"{row['jobs']:,}", f"{row['gpu_hours']:,.0f}")
                for row in found["sizes"]
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
