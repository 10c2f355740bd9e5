"""Checkpoints in an object store.

    <root>/<job>/<name>/checkpoint.json       the manifest, which names the attempt; written last
    <root>/<job>/<name>/<attempt>/<file>      all other files of one attempt to write it
    <root>/.coming/<node>/<job>/<name>        it waits or is being written; holds <attempt>
    <root>/.renewed/<node>                    changes while the node lives and writes checkpoints

A checkpoint exists if its manifest does. The manifest is one object, so a checkpoint exists as a
whole or not at all. Nothing is renamed. Files of an attempt that no manifest names are deleted when
the daemon of their node starts, or as garbage.
"""

import logging
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from plexrl.errors import (
    CheckpointExistsError,
    CorruptStateError,
    InvalidRequestError,
    PlexRLError,
    StoreUnavailableError,
)
from plexrl.statemanager.checkpoint.format.record import (
    RECORD,
    CheckpointRecord,
    decode_record,
    encode_record,
)
from plexrl.statemanager.checkpoint.places.directory import damaged, not_found
from plexrl.statemanager.checkpoint.places.object_files import ObjectFiles
from plexrl.statemanager.checkpoint.places.place import StoredFile
from plexrl.statemanager.checkpoint.write.object_stream import ObjectStream
from plexrl.storage.object_store import ObjectStore

LOG = logging.getLogger(__name__)

COMING, RENEWED = ".coming", ".renewed"
GARBAGE_AGE_S = 3600.0
"""Age of files from which on they may be garbage. A writer announces its checkpoint, and a reader
that began before an overwrite has this time to end."""


@dataclass(frozen=True, slots=True)
class ObjectPlace:
    """One checkpoint in an object store."""

    store: ObjectStore
    job: str
    name: str

    def __str__(self) -> str:
        return f"{self.store.url}/{self.job}/{self.name}"

    @property
    def key(self) -> str:
        """Key of the checkpoint's folder."""
        return f"{self.job}/{self.name}"

    @property
    def record_key(self) -> str:
        """Key of the manifest."""
        return f"{self.key}/{RECORD}"

    def exists(self) -> bool:
        try:
            self.store.size(self.record_key)
        except FileNotFoundError:
            return False
        return True

    def read_record(self) -> CheckpointRecord:
        try:
            return decode_record(self.store.read(self.record_key))
        except FileNotFoundError as error:
            raise not_found(self.job, self.name) from error
        except CorruptStateError as error:
            raise damaged(str(self), error) from error

    def written_ns(self) -> int:
        return int(self.store.describe(self.record_key).modified_s * 1e9)

    def open_files(self, record: CheckpointRecord) -> ObjectFiles:
        return ObjectFiles(self.store, f"{self.key}/{record.attempt}")

    def announce(self, node: str) -> None:
        try:
            # An earlier request for this name may be at work: its attempt stays noted.
            self.store.size(self.coming_key(node))
        except FileNotFoundError:
            self.store.write(self.coming_key(node), b"")

    def announce_end(self, node: str) -> None:
        try:
            self.store.delete([self.coming_key(node)])
        except PlexRLError as error:
            # The next start of the node's daemon deletes it.
            LOG.warning("%s is announced although it is written: %s", self, error)

    def renew(self, node: str) -> None:
        self.store.write(f"{RENEWED}/{node}", uuid.uuid4().hex.encode())

    def announced(self) -> dict[str, str]:
        found = (each.key.split("/") for each in self.store.find(COMING))
        nodes = [node for _, node, *place in found if place == [self.job, self.name]]
        return {node: self._renewal(node) for node in nodes}

    def coming_key(self, node: str) -> str:
        """Key of the announcement by a node."""
        return f"{COMING}/{node}/{self.job}/{self.name}"

    def _renewal(self, node: str) -> str:
        try:
            return self.store.read(f"{RENEWED}/{node}").decode()
        except FileNotFoundError:
            return ""

    def announced_attempt(self, node: str) -> str:
        """The attempt that a node has announced, '' if none has begun."""
        try:
            return self.store.read(self.coming_key(node)).decode()
        except FileNotFoundError:
            return ""

    def is_published(self, attempt: str) -> bool:
        """Whether the checkpoint is of this attempt."""
        try:
            return self.published_attempt() == attempt
        except FileNotFoundError:
            return False

    def draft(self, node: str) -> "ObjectDraft":
        return ObjectDraft(self, node)

    def delete(self, node: str) -> None:
        del node
        attempt = self.published_attempt()
        self.store.delete([self.record_key])
        self.delete_attempt(attempt)

    def delete_attempt(self, attempt: str) -> None:
        """Delete the files of one attempt."""
        self.store.delete(each.key for each in self.store.find(f"{self.key}/{attempt}"))

    def share(self, job: str, name: str, node: str) -> None:
        del node
        raise InvalidRequestError(
            f"checkpoint {self} cannot be shared with {job}/{name}: an object store has no links, "
            "so forks need checkpoints in a folder"
        )

    def files(self) -> list[StoredFile]:
        prefix = f"{self.key}/{self.read_record().attempt}/"
        found = [
            StoredFile(each.key.removeprefix(prefix), each.nbytes, each.key)
            for each in self.store.find(prefix.rstrip("/"))
        ]
        manifest = StoredFile(RECORD, self.store.size(self.record_key), self.record_key)
        return sorted([*found, manifest], key=lambda file: file.path)

    def read_range(self, file: StoredFile, start: int, stop: int) -> bytes:
        return self.store.read_range(file.source, start, stop)

    def published_attempt(self) -> str:
        """The attempt of the manifest, '' if it is damaged. Raises `FileNotFoundError`."""
        try:
            return decode_record(self.store.read(self.record_key)).attempt
        except CorruptStateError:
            return ""


class ObjectRoot:
    """All jobs' checkpoints below one URL."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def place(self, job: str, name: str) -> ObjectPlace:
        return ObjectPlace(self._store, job, name)

    def complete(self, job: str) -> Iterator[tuple[ObjectPlace, CheckpointRecord]]:
        found: dict[str, CheckpointRecord] = {}

        def read(name: str) -> None:
            try:
                found[name] = self.place(job, name).read_record()
            except StoreUnavailableError:
                # A checkpoint that is left out would seem to be deleted.
                raise
            except PlexRLError as error:
                LOG.warning("%s is skipped: %s", self.place(job, name), error)

        self._store.each(read, self._published(job))
        for name in sorted(found):
            yield self.place(job, name), found[name]

    def sweep(self, node: str) -> list[str]:
        removed = []
        for each in self._store.find(f"{COMING}/{node}"):
            job, name = each.key.split("/")[2:4]
            place = self.place(job, name)
            if (attempt := place.announced_attempt(node)) and not place.is_published(attempt):
                place.delete_attempt(attempt)
                removed.append(f"{place}/{attempt}")
            self._store.delete([each.key])
        return removed

    def collect_garbage(self, job: str) -> None:
        limit = time.time() - GARBAGE_AGE_S
        attempts = {record.attempt for _, record in self.complete(job)}
        attempts |= {self._store.read(each.key).decode() for each in self._store.find(COMING)}
        garbage = []
        for each in self._store.find(job):
            parts = each.key.split("/")
            if len(parts) > 3 and parts[2] not in attempts and each.modified_s < limit:
                garbage.append(each.key)
        self._store.delete(garbage)

    def use(self, jobs: Iterable[str], but: tuple[str, str] | None) -> tuple[int, int]:
        count = nbytes = 0
        for job in sorted(set(jobs)):
            names = set()
            for each in self._store.find(job):
                name = each.key.split("/")[1]
                if but == (job, name):
                    continue
                nbytes += each.nbytes
                names.add(name)
            count += len(names)
        return count, nbytes

    def capacity_bytes(self) -> None:
        return None

    def _published(self, job: str) -> list[str]:
        """Names with a manifest; the others are unfinished or garbage, not damaged."""
        keys = [each.key.split("/") for each in self._store.find(job)]
        return sorted(parts[1] for parts in keys if len(parts) == 3 and parts[2] == RECORD)


class ObjectDraft:
    """Files of one attempt."""

    def __init__(self, place: ObjectPlace, node: str) -> None:
        self._place = place
        self._node = node
        self._attempt = ""
        self._replaced: str | None = None
        """An attempt of the same request that was published."""

    def begin(self) -> None:
        place = self._place
        if left := self._attempt or place.announced_attempt(self._node):
            # The answer to `publish` may have been lost. Readers may use that checkpoint.
            if place.is_published(left):
                self._replaced = left
            else:
                place.delete_attempt(left)
        attempt = uuid.uuid4().hex[:16]
        # Announced first: if this process is killed, the next one finds the files.
        place.store.write(place.coming_key(self._node), attempt.encode())
        self._attempt = attempt

    def join(self) -> bool:
        self._attempt = self._place.announced_attempt(self._node)
        return bool(self._attempt)

    def add(self, name: str, content: bytes) -> None:
        self._place.store.write(self._key(name), content)

    def stream(
        self, path: str, nbytes: int, *, space_bytes_max: int, replace: bool = False
    ) -> ObjectStream:
        del replace
        return ObjectStream(
            self._place.store, self._key(path), nbytes, space_bytes_max=space_bytes_max
        )

    def publish(self, record: CheckpointRecord, *, overwrite: bool) -> None:
        place, store = self._place, self._place.store
        text = encode_record(replace(record, attempt=self._attempt))
        old: str | None = None
        with suppress(FileNotFoundError):
            old = place.published_attempt()
        if old == self._attempt:
            return
        if old is None:
            # False also if an attempt of this very call has stored it.
            is_new = store.create(place.record_key, text)
            if is_new or store.read(place.record_key) == text:
                return
            old = place.published_attempt()
        if not overwrite and old != self._replaced:
            raise CheckpointExistsError(
                f"checkpoint {place.name!r} exists: choose another name or set overwrite"
            )
        store.write(place.record_key, text)
        if old:
            try:
                place.delete_attempt(old)
            except PlexRLError as error:
                LOG.warning("files of the replaced checkpoint %s stay for now: %s", place, error)

    def drop(self) -> None:
        if not self._attempt:
            return
        try:
            self._place.delete_attempt(self._attempt)
        except PlexRLError as error:
            LOG.warning("files of an attempt to write %s stay for now: %s", self._place, error)
        self._attempt = ""

    def _key(self, path: str) -> str:
        return f"{self._place.key}/{self._attempt}/{path}"
