"""An object that is written part by part and appears as a whole."""

from typing import Any, Protocol

from plexrl.storage.object_store import ObjectStore, error_code

S3_PARTS_AT_ONCE = 4


class MultipartUpload(Protocol):
    """An object that is being written. Methods raise `StoreUnavailableError`."""

    parts_at_once: int
    """Calls of `send` that may run at a time. At 1 they must be in order."""

    def send(self, number: int, data: bytes) -> None:
        """Send part `number`, counted from 1. All parts but the last have the same size."""
        ...

    def publish(self) -> None:
        """Let the object appear, once all parts are sent."""
        ...

    def drop(self) -> None:
        """Give up. Never raises."""
        ...


def begin_upload(store: ObjectStore, key: str, nbytes: int, part_bytes: int) -> MultipartUpload:
    """Begin to write an object of `nbytes`. Raises `StoreUnavailableError`."""
    if nbytes <= part_bytes:
        return _WholeUpload(store, key)
    if hasattr(store.filesystem, "call_s3"):
        return _S3Upload(store, key, nbytes)
    return _StreamUpload(store, key, part_bytes)


class _WholeUpload:
    """An object of one part."""

    parts_at_once = 1

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store = store
        self._key = key
        self._data = b""

    def send(self, number: int, data: bytes) -> None:
        del number
        self._data += data

    def publish(self) -> None:
        self._store.write(self._key, self._data)

    def drop(self) -> None:
        self._data = b""


class _S3Upload:
    """A multipart upload to S3, several parts at a time, each repeated on its own."""

    parts_at_once = S3_PARTS_AT_ONCE

    def __init__(self, store: ObjectStore, key: str, nbytes: int) -> None:
        self._store = store
        self._key = key
        self._nbytes = nbytes
        bucket, name, _ = store.filesystem.split_path(store.path(key))
        self._where: dict[str, Any] = {"Bucket": bucket, "Key": name}
        begun = self._call("create_multipart_upload")
        self._upload: dict[str, Any] = {"UploadId": begun["UploadId"]}
        self._etags: dict[int, str] = {}

    def send(self, number: int, data: bytes) -> None:
        limit = self._store.limit(len(data))
        sent = self._call("upload_part", **self._upload, PartNumber=number, Body=data, **limit)
        self._etags[number] = sent["ETag"]

    def publish(self) -> None:
        parts = [{"PartNumber": n, "ETag": self._etags[n]} for n in sorted(self._etags)]

        def attempt() -> None:
            try:
                self._store.filesystem.call_s3(
                    "complete_multipart_upload",
                    **self._where,
                    **self._upload,
                    MultipartUpload={"Parts": parts},
                )
            except OSError as error:
                # An earlier attempt may have completed it although its answer was lost.
                if error_code(error) != "NoSuchUpload" or not self._is_complete():
                    raise

        self._store.call(f"publish {self._key}", attempt)

    def drop(self) -> None:
        try:
            self._store.filesystem.call_s3("abort_multipart_upload", **self._where, **self._upload)
        # The store's rule for unfinished uploads deletes the parts.
        except Exception:
            return

    def _is_complete(self) -> bool:
        try:
            return self._store.size(self._key) == self._nbytes
        except FileNotFoundError:
            return False

    def _call(self, method: str, **fields: Any) -> dict[str, Any]:
        def attempt() -> dict[str, Any]:
            found: dict[str, Any] = self._store.filesystem.call_s3(method, **self._where, **fields)
            return found

        return self._store.call(f"write {self._key}", attempt)


class _StreamUpload:
    """A file of another `fsspec` file system, which publishes it at its end."""

    parts_at_once = 1

    def __init__(self, store: ObjectStore, key: str, part_bytes: int) -> None:
        self._store = store
        self._what = f"write {key}"
        self._file: Any = store.call(
            self._what,
            lambda: store.filesystem.open(
                store.path(key), "wb", block_size=part_bytes, autocommit=False
            ),
        )

    def send(self, number: int, data: bytes) -> None:
        del number
        self._once(lambda: self._file.write(data))

    def publish(self) -> None:
        self._once(self._file.close)
        self._once(self._file.commit)

    def drop(self) -> None:
        try:
            self._file.discard()
        # A file without `autocommit` is not published when it is collected.
        except Exception:
            return

    def _once(self, work: Any) -> None:
        """A part of a stream cannot be repeated: the whole object must be."""
        try:
            work()
        except Exception as error:
            raise self._store.unavailable(self._what, error) from error
