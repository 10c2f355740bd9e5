"""The reference of all settings, and the effective values of a file."""

import json
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from plexrl.cluster.config.checks import SIZE_ENDINGS
from plexrl.cluster.config.options import SECRETS
from plexrl.cluster.config.schema import CLUSTER_FILE, NODE_FILE, ConfigSection, field_docs

HIDDEN = "***"
OPTIONAL = ("network", "ray", "events")
"""Tables whose presence turns something on."""
INTRODUCTION = """\
# Configuration files

`plexrl up --config cluster.toml` and `plexrl node join --config node.toml` read these settings;
options of the command line override the file. The file is [TOML](https://toml.io) with a table for
each part. `plexrl config check FILE` reports all problems at once, `plexrl config show FILE` prints
the effective values with secrets hidden, and `plexrl config reference` prints this page. A setting
whose name ends in `_bytes`, `_bytes_max` or `_bytes_per_s` is a number, or a text with a unit, such
as `"64GiB"`.

```toml
[cluster]
data_dir = "/var/lib/plexrl"
host = "0.0.0.0"
nodes = 0

[network]
advertise = "head.example"

[scheduler]
policy = "spread+backfill"
```
"""


def reference() -> str:
    """The page docs/configuration.md."""
    own = [each for each in NODE_FILE if each not in CLUSTER_FILE]
    parts = [INTRODUCTION, "## The file of a cluster\n"]
    parts += [_table(section) for section in CLUSTER_FILE]
    parts.append("## The file of a node\n")
    parts += [_table(section) for section in own]
    shared = " and ".join(f"`[{each.name}]`" for each in NODE_FILE if each not in own)
    parts.append(f"{shared} are as in the file of a cluster.\n")
    return "\n".join(parts)


def effective(tables: Mapping[str, Mapping[str, Any]], sections: Sequence[ConfigSection]) -> str:
    """Every setting with its effective value, as TOML; absent values are comments."""
    lines = []
    for section in sections:
        if section.name in OPTIONAL and section.name not in tables:
            continue
        values = {**section.defaults(), **tables.get(section.name, {})}
        lines.append(f"[{section.name}]")
        for name in section.settings():
            value = values.get(name)
            if value is None:
                lines.append(f"# {name} is absent")
            else:
                lines.append(f"{name} = {_shown(name, hide_secrets(name, value))}")
        lines.append("")
    return "\n".join(lines)


def hide_secrets(name: str, value: Any) -> Any:
    """The value without the password of a database's URL, and without key digests."""
    if name == "tenants":
        return [(tenant, HIDDEN) for tenant, _ in value]
    if not isinstance(value, str) or "://" not in value:
        return value
    import sqlalchemy as sa

    try:
        url = sa.make_url(value)
    except sa.exc.ArgumentError:
        # Nobody can say where the password would be.
        return HIDDEN
    query = {key: HIDDEN if key in SECRETS else each for key, each in url.query.items()}
    return url.set(query=query).render_as_string(hide_password=True)


def toml_value(value: Any) -> str:
    """A value as TOML."""
    plain = msgspec.to_builtins(str(value) if isinstance(value, Path) else value)
    if isinstance(plain, dict):
        inner = (f"{json.dumps(key)} = {toml_value(each)}" for key, each in plain.items())
        shown = ", ".join(each for each in inner if not each.endswith("= "))
        return f"{{{shown}}}"
    if isinstance(plain, list | tuple):
        return f"[{', '.join(toml_value(each) for each in plain)}]"
    if plain is None:
        return ""
    return json.dumps(plain, ensure_ascii=False)


def _shown(name: str, value: Any) -> str:
    """A value as TOML, sizes with a unit if that is exact."""
    if isinstance(value, int) and name.endswith(SIZE_ENDINGS):
        for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
            if value and value % (1 << shift) == 0:
                return f'"{value >> shift}{unit}"'
    return toml_value(value)


def _table(section: ConfigSection) -> str:
    hints, docs, defaults = section.hints(), field_docs(section.kind), section.defaults()
    lines = [f"### `[{section.name}]`", "", section.what, ""]
    lines += ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for name in section.settings():
        default = defaults.get(name)
        shown = "" if default in (None, "", (), {}) else f"`{_shown(name, default)}`"
        row = (f"`{name}`", type_text(hints[name]), shown, docs.get(name, ""))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join([*lines, ""])


def type_text(hint: Any) -> str:
    """A setting's type, in words."""
    names: dict[Any, str] = {
        int: "integer",
        float: "number",
        str: "text",
        bool: "true or false",
        Path: "path",
        type(None): "",
    }
    if hint in names:
        return names[hint]
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is tuple:
        inner = [type_text(argument) for argument in arguments if argument is not Ellipsis]
        return f"list of {inner[0]}" if Ellipsis in arguments else f"[{', '.join(inner)}]"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"table of {type_text(arguments[1])}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " or ".join(f"`{each.value}`" for each in hint)
    if arguments:
        return " or ".join(filter(None, map(type_text, arguments)))
    return str(getattr(hint, "__name__", hint))
