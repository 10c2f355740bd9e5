"""Finds all problems of a configuration file at once."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from plexrl.cluster.config.schema import MOVED, ConfigSection
from plexrl.cluster.config.sizes import parse_size
from plexrl.errors import ConfigError, InvalidRequestError

SIZE_ENDINGS = ("_bytes", "_bytes_max", "_bytes_per_s")
"""Endings of settings that may be written as text with a unit, such as `64GiB`."""


class ConfigProblem(NamedTuple):
    """One problem of a file."""

    path: str
    """`table.setting`, `table`, or empty for the whole file."""
    message: str
    """What is wrong, and how to mend it."""


def check_tables(
    tables: Mapping[str, Any], sections: Sequence[ConfigSection]
) -> tuple[dict[str, dict[str, Any]], list[ConfigProblem]]:
    """(values of the right types by table, problems). A value with a problem is left out."""
    known = {section.name: section for section in sections}
    problems = [_unknown_table(name, known, tables[name]) for name in tables if name not in known]
    found: dict[str, dict[str, Any]] = {}
    for name, section in known.items():
        table = tables.get(name)
        if table is None:
            continue
        if not isinstance(table, dict):
            problems.append(
                ConfigProblem(name, f"this is a table: write [{name}] on a line of its own")
            )
            continue
        values, wrong = _convert_values(section, table, known)
        problems += wrong
        found[name] = values
        # Some checks of one table depend on whether another is there.
        others = {each: known[each].kind() for each in ("network",) if each in tables}
        problems += _find_refused(section, values, others)
    return found, problems


def config_error(source: str, problems: Sequence[ConfigProblem]) -> ConfigError:
    """One error for all problems of a file."""
    count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"  {problem.path}: {problem.message}" for problem in problems]
    return ConfigError(
        "\n".join([f"{source} has {count}; nothing was started:", *lines]),
        problems=[problem._asdict() for problem in problems],
    )


def _convert_values(
    section: ConfigSection, table: Mapping[str, Any], known: Mapping[str, ConfigSection]
) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """The table's values with their types, and problems with names and types."""
    hints, settings = section.hints(), section.settings()
    values: dict[str, Any] = {}
    problems = []
    for name, value in table.items():
        path = f"{section.name}.{name}"
        if name not in settings:
            problems.append(ConfigProblem(path, _unknown_setting(section, name, known)))
            continue
        try:
            if isinstance(value, str) and name.endswith(SIZE_ENDINGS):
                value = parse_size(value)
            values[name] = msgspec.convert(value, hints[name], dec_hook=_decode)
        except msgspec.ValidationError as error:
            problems.append(
                ConfigProblem(path, f"{value!r} does not fit: {error}".replace("`", ""))
            )
        except InvalidRequestError as error:
            problems.append(ConfigProblem(path, error.message))
    problems += [
        ConfigProblem(
            f"{section.name}.{name}", "this setting is required: add it, or remove the table"
        )
        for name in section.required()
        if name not in table
    ]
    return values, problems


def _decode(kind: type[Any], value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value).expanduser()
    raise NotImplementedError(kind)


def _find_refused(
    section: ConfigSection, values: dict[str, Any], others: Mapping[str, Any]
) -> Iterator[ConfigProblem]:
    """Problems that the section's dataclass finds. It raises the first one only, so the setting at
    fault is taken out and the rest is tried again. Removes those settings from `values`."""
    required = {
        name: value
        for name, value in {**section.stand_ins, **others}.items()
        if name in section.hints()
    }
    while (error := _attempt(section, required, values)) is not None:
        for name in sorted(
            values, key=lambda each: (not error.startswith(each), each not in error)
        ):
            rest = {each: value for each, value in values.items() if each != name}
            if _attempt(section, required, rest) != error:
                del values[name]
                yield ConfigProblem(f"{section.name}.{name}", error)
                break
        else:
            yield ConfigProblem(section.name, error)
            return


def _attempt(
    section: ConfigSection, required: Mapping[str, Any], values: Mapping[str, Any]
) -> str | None:
    """Why the section's dataclass refuses these values; None: it does not."""
    try:
        section.kind(**{**required, **values})
    except InvalidRequestError as error:
        return error.message
    except TypeError as error:
        return f"a setting is missing: {error}"
    return None


def _unknown_table(name: str, known: Mapping[str, ConfigSection], value: Any) -> ConfigProblem:
    if not isinstance(value, dict):
        owners = [each.name for each in known.values() if name in each.settings()]
        where = f"it belongs under [{owners[0]}]" if owners else "put settings into a table"
        return ConfigProblem(name, f"this setting is in no table: {where}")
    return ConfigProblem(name, f"there is no such table: {_near(name, list(known))}")


def _unknown_setting(section: ConfigSection, name: str, known: Mapping[str, ConfigSection]) -> str:
    if name in section.derived:
        table = next((each for each, names in MOVED.items() if name in names), "")
        if table and section.name == "cluster":
            return f"this setting is in another table: move it to [{table}]"
        return "the launcher sets this itself: remove it"
    owners = [each.name for each in known.values() if name in each.settings()]
    if owners:
        return f"this setting is in another table: move it to [{owners[0]}]"
    return f"there is no such setting: {_near(name, list(section.settings()))}"


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return (
        f"use one of {', '.join(known)}" if len(known) < 12 else "`plexrl config reference` lists"
    )
