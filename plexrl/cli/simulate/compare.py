"""`plexrl simulate compare`: compares two results."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plexrl.cli.terminal.context import Json, print_line, print_table, warn, write_json
from plexrl.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from plexrl.sim.results.compared import ComparedSetting, Figure, ResultComparison, Unit

RESULTS = "results.json"
SHOWN_VALUES = 3
"""Most values that are shown of a swept setting."""

HELP = "A folder of `plexrl simulate --out`, or its results.json."
First = Annotated[Path, typer.Argument(metavar="A", help=HELP)]
Second = Annotated[Path, typer.Argument(metavar="B", help=HELP)]


def compare(a: First, b: Second, as_json: Json = False) -> None:
    """Compare two results of `plexrl simulate --out`: settings and figures."""
    from plexrl.sim.results.compared import compare_results

    documents = [_document(each) for each in (a, b)]
    found = compare_results(*documents)
    for warning in found.warnings:
        warn(f"plexrl: {warning}")
    if as_json:
        write_json({"a": str(a), "b": str(b), **_values(found)})
    else:
        _show(a, b, found)
    if not found.pairs:
        raise InvalidRequestError(
            f"no run of {a} has a counterpart in {b}: the first has {_listed(found.only_a)}, the "
            f"other {_listed(found.only_b)}; run both with a common policy, size and seed"
        )


def _document(path: Path) -> dict[str, object]:
    """The results in a folder or file.

    Raises:
        InvalidRequestError: there are no results.
    """
    file = path / RESULTS if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequestError(
            f"{file} cannot be read: {error.strerror}; give a folder of `plexrl simulate --out`"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{file} is not JSON: {error}") from error
    if not _is_document(found):
        raise InvalidRequestError(
            f"{file} is not a {RESULTS} of `plexrl simulate --out`: it lacks a trace, or runs with "
            "a scenario and a result each"
        )
    if not found["runs"]:
        raise InvalidRequestError(f"{file} has no completed run: there is nothing to compare")
    assert isinstance(found, dict), "checked above"
    return found


def _is_document(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and isinstance(found.get("trace"), dict)
        and isinstance(found.get("runs"), list)
        and all(
            isinstance(run, dict)
            and isinstance(run.get("scenario"), dict)
            and isinstance(run.get("result"), dict)
            for run in found["runs"]
        )
    )


def _values(found: "ResultComparison") -> dict[str, object]:
    values = asdict(found)
    for of in ("pairs", "smallest"):
        for pair, plain in zip(getattr(found, of), values[of], strict=True):
            for figure, each in zip(pair.figures, plain["figures"], strict=True):
                each |= {"difference": figure.difference, "change": figure.change}
    return values


def _show(a: Path, b: Path, found: "ResultComparison") -> None:
    print_line(f"A: {a}")
    print_line(f"B: {b}")
    if found.settings:
        print_table("Different settings", ("", "A", "B"), map(_setting, found.settings))
    else:
        print_line("The settings are equal.")
    for pair in found.smallest:
        sizes = [_figure(figure) for figure in pair.figures]
        print_table(f"Smallest cluster, {pair.label}", ("", "A", "B", "B - A", "change"), sizes)
    for pair in found.pairs:
        if not any(figure.differs for figure in pair.figures):
            print_line(f"{pair.label}: equal figures.")
            continue
        rows = [_figure(figure) for figure in pair.figures if figure.a or figure.b]
        print_table(pair.label, ("", "A", "B", "B - A", "change"), rows)
    for name, only in (("A", found.only_a), ("B", found.only_b)):
        if only and found.pairs:
            print_line(f"Only in {name}: {_listed(only)}")


def _setting(setting: "ComparedSetting") -> tuple[str, str, str]:
    a, b = (_listed(map(_shown_value, values)) for values in (setting.a, setting.b))
    return setting.name, a, b


def _shown_value(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _listed(values: "Iterable[str]") -> str:
    texts = [*values]
    more = f" and {len(texts) - SHOWN_VALUES} more" if len(texts) > SHOWN_VALUES else ""
    return "; ".join(texts[:SHOWN_VALUES]) + more


def _figure(figure: "Figure") -> tuple[str, str, str, str, str]:
    unit, difference, change = figure.unit, figure.difference, figure.change
    a, b = _amount(figure.a, unit), _amount(figure.b, unit)
    if difference is None:
        return figure.name, a, b, "", ""
    if a == b:
        return figure.name, a, b, "=", ""
    text = ("+" if difference > 0 else "-") + _amount(abs(difference), unit)
    if unit == "part":
        return figure.name, a, b, text.replace("%", "points"), ""
    return figure.name, a, b, text, "" if change is None else f"{100 * change:+.1f} %"


def _amount(value: float | None, unit: "Unit") -> str:
    from plexrl.cli.simulate.tables import money, span
    from plexrl.sim.report.units import percent

    if value is None:
        return "-"
    match unit:
        case "time":
            return span(value)
        case "part":
            return percent(value)
        case "money":
            return money(value)
        case "count":
            return f"{value:,.0f}" if value.is_integer() else f"{value:,.3f}"
