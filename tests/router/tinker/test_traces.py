"""Exported timelines take a bounded part of the disk."""

import os
from pathlib import Path

from plexrl.router.tinker.messages.perfetto import Timeline
from plexrl.router.tinker.routes.traces import KEPT_MAX, SUFFIX, _write

EMPTY = Timeline(session="s", began_at=0.0, ended_at=1.0, rows=[], unfinished={})


def test_an_export_more_than_are_kept_deletes_the_tenants_oldest_one(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    _write(folder, f"other-0{SUFFIX}", EMPTY)
    first = (folder / f"other-0{SUFFIX}").stat().st_mtime
    for number in range(KEPT_MAX + 3):
        name = f"own-{number}{SUFFIX}"
        _write(folder, name, EMPTY)
        os.utime(folder / name, (first + number, first + number))
    kept = {file.name for file in folder.iterdir()}
    newest = {f"own-{number}{SUFFIX}" for number in range(3, KEPT_MAX + 3)}
    assert kept == newest | {f"other-0{SUFFIX}"}
