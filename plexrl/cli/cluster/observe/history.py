"""`plexrl history`: what the archive of the journal has; deletion of a tenant's part."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from plexrl.cli.terminal.context import (
    DATA_DIR,
    Cells,
    DataDir,
    Output,
    print_line,
    write_text,
)
from plexrl.cli.terminal.help import CommandGroup
from plexrl.cli.terminal.option_groups import with_option_groups
from plexrl.cli.terminal.sizes import size_text
from plexrl.cluster.data_dir.folder import data_dir_at
from plexrl.limits import check_numbers

if TYPE_CHECKING:
    from plexrl.scheduler.service.journal.history.archive import Archive
    from plexrl.scheduler.service.journal.history.pieces import ArchivePiece

history_app = typer.Typer(
    cls=CommandGroup,
    help="The archive of what happened: sizes, events, deletion (operator only).",
    no_args_is_help=True,
)
HOUR_S = 3600.0


class DayView(TypedDict):
    """What the archive has of one day, by the day of its end (UTC)."""

    day: str
    events: int
    operations: int
    snapshots: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveAt:
    """The options by which a command finds the archive; no cluster need run."""

    archive: Annotated[
        str | None,
        typer.Option(
            help="Folder or URL, as --archive-url of `plexrl up`; absent: in the data directory.",
            envvar="PLEXRL_ARCHIVE_URL",
        ),
    ] = None
    data_dir: DataDir = DATA_DIR

    def open(self) -> "Archive":
        """The archive. Raises `InvalidRequestError`: its location cannot be used."""
        from plexrl.scheduler.service.journal.history.archive import Archive
        from plexrl.storage.location import check_location

        location = self.archive or str(data_dir_at(self.data_dir) / "history")
        check_location("archive", location)
        return Archive(location)


@history_app.command("list")
@with_option_groups
def list_days(at: ArchiveAt, output: Output) -> None:
    """Events, operations, snapshots and bytes of each day."""
    days = days_of(at.open().pieces())
    cells: Cells = {
        **{name: name for name in ("day", "events", "operations", "snapshots")},
        "size": lambda each: size_text(each["bytes"]),
    }
    output.table(cells, days)
    if not output.as_json:
        print_line(f"{size_text(sum(day['bytes'] for day in days))} together.")


@history_app.command("events")
@with_option_groups
def print_events(
    at: ArchiveAt,
    since_hours: Annotated[float, typer.Option(help="Events from so many hours ago on.")] = 1.0,
    until_hours: Annotated[float, typer.Option(help="And until so many hours ago.")] = 0.0,
) -> None:
    """The archived events of a time, as lines of JSON."""
    import time

    import msgspec

    from plexrl.scheduler.service.journal.history.reading import HistoryReader
    from plexrl.scheduler.state.messages.events import CODEC

    check_numbers("plexrl history events", {"since_hours": since_hours, "until_hours": until_hours})
    now = time.time()
    window = now - since_hours * HOUR_S, now - until_hours * HOUR_S
    for entry in HistoryReader(at.open()).entries(*window):
        event = msgspec.Raw(CODEC.encode(entry.event))
        line = {"position": entry.position, "at": entry.at, "event": event}
        write_text(msgspec.json.encode(line).decode() + "\n")


@history_app.command("delete")
@with_option_groups
def delete(
    tenant: Annotated[str, typer.Argument(help="The tenant whose history is deleted.")],
    at: ArchiveAt,
    output: Output,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete what the archive has of a tenant; that of others stays. It cannot be undone."""
    from plexrl.ids import TenantId
    from plexrl.scheduler.service.journal.history.deletion import delete_tenant

    archive = at.open()
    if not yes:
        typer.confirm(f"Delete the history of {tenant} in {archive.location}?", abort=True)
    deleted = delete_tenant(archive, TenantId(tenant))
    found = {
        "tenant": tenant,
        **{name: getattr(deleted, name) for name in ("events", "runs", "snapshots", "damaged")},
    }
    cells: Cells = {name: name for name in ("tenant", "events", "runs", "snapshots")}
    output.table({**cells, "damaged pieces": lambda each: len(each["damaged"])}, [found], found)


def days_of(pieces: Iterable["ArchivePiece"]) -> list[DayView]:
    """The content of the pieces by day, the oldest first."""
    days: dict[str, DayView] = {}
    for piece in pieces:
        name = datetime.fromtimestamp(piece.end, UTC).date().isoformat()
        day = days.setdefault(name, _empty(name))
        day["bytes"] += piece.nbytes
        count = piece.last - piece.first + 1
        match piece.kind:
            case "events":
                day["events"] += count
            case "runs":
                day["operations"] += count
            case _:
                day["snapshots"] += 1
    return [days[name] for name in sorted(days)]


def _empty(name: str) -> DayView:
    return {"day": name, "events": 0, "operations": 0, "snapshots": 0, "bytes": 0}
