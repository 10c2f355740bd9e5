"""What a cluster has acknowledged, counted on the disk of the machine that holds its journal."""

import shutil
from pathlib import Path

import xxhash

from plexrl.errors import PayloadLostError
from plexrl.ids import BlobRef
from plexrl.router.blobs.store import blob_name, check_digest
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.service.journal.recovery import restore
from plexrl.scheduler.service.journal.sql_journal import SqlJournal
from tests.hosts.jobs import Jobs

JOURNAL = "journal.sqlite"
BLOBS = "blobs"


def accepted_operations(jobs: Jobs) -> list[str]:
    """The operations whose acceptance controllers have printed."""
    lines = jobs.printed().splitlines()
    return [line.removeprefix("accepted ") for line in lines if line.startswith("accepted ")]


def count_lost(data_dir: Path, accepted: list[str], scratch: Path) -> tuple[int, int, int]:
    """(operations that the journal does not have, payloads that are damaged or missing, payloads
    that were looked at). `data_dir` is that of a cluster that does not run; it is only read."""
    scratch.mkdir()
    # A reader of the journal itself would write its log into it.
    for path in data_dir.glob(f"{JOURNAL}*"):
        shutil.copy2(path, scratch)
    copy = str(scratch / JOURNAL)
    config = SchedulerConfig(listen=("unix:/nowhere",), journal=copy, operator_key_digest="0" * 64)
    journal = SqlJournal(copy)
    try:
        operations = restore(config, journal).core._context.state.operations
    finally:
        journal.close()
        shutil.rmtree(scratch)
    missing = [name for name in accepted if name not in operations]
    blobs = data_dir / BLOBS
    if not blobs.is_dir():
        # They are in an object store, which kept its power.
        return len(missing), 0, 0
    payloads = [
        operation.payload
        for operation in operations.values()
        # The others' payloads may be deleted at any time.
        if operation.payload is not None and (operation.is_logged or not operation.state.is_final)
    ]
    damaged = [ref for ref in payloads if not _is_whole(blobs, ref)]
    return len(missing), len(damaged), len(payloads)


def _is_whole(blobs: Path, ref: BlobRef) -> bool:
    try:
        check_digest(ref, xxhash.xxh3_128_hexdigest((blobs / blob_name(ref)).read_bytes()))
    except (OSError, PayloadLostError):
        return False
    return True
