"""Objects in a real S3 server that is killed, hung and closed to the client."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plexrl.errors import InvalidRequestError, StoreUnavailableError
from plexrl.storage.location import check_location, is_url
from plexrl.storage.object_store import RANGE_BYTES, ObjectStore
from tests.s3_server import S3Server, s3_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def store(
    server: S3Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ObjectStore]:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    opened = ObjectStore(server.url(request.node.name.strip("[]")))
    yield opened
    opened.close()


def test_objects_are_written_listed_read_in_ranges_and_deleted(store: ObjectStore) -> None:
    store.write("a/one", b"1")
    store.write("a/b/two", b"12")
    store.write("c/empty", b"")
    store.write("a/one", b"first")

    found = store.find("")
    assert [(each.key, each.nbytes) for each in found] == [
        ("a/b/two", 2),
        ("a/one", 5),
        ("c/empty", 0),
    ]
    assert all(each.modified_s > 1_600_000_000 for each in found)
    assert store.folders("") == ["a", "c"]
    assert store.folders("a") == ["b"]
    assert store.read("a/one") == b"first"
    assert store.read("c/empty") == b""
    assert store.read_range("a/one", 1, 4) == b"irs"
    store.delete(["a/one", "c/empty", "nothing"])
    assert [each.key for each in store.find("")] == ["a/b/two"]
    assert store.find("missing") == []
    assert store.folders("missing") == []
    with pytest.raises(FileNotFoundError):
        store.read("a/one")
    with pytest.raises(FileNotFoundError):
        store.size("a/one")


def test_a_large_file_is_written_in_parts_and_read_in_parallel_ranges(
    store: ObjectStore, tmp_path: Path
) -> None:
    content = bytes(range(256)) * (5 * RANGE_BYTES // 512)
    path = tmp_path / "file"
    path.write_bytes(content)
    store.write_file("large", path)
    assert store.size("large") == len(content)
    found = bytearray(len(content))

    def take(key: str, start: int, data: bytes) -> None:
        assert key == "large"
        found[start : start + len(data)] = data

    store.read_ranges([("large", 0, 100), ("large", 100, len(content))], take)
    assert found == content


def test_requests_go_on_when_a_killed_server_is_back(server: S3Server, store: ObjectStore) -> None:
    store.write("before", b"kept")
    server.kill()
    starting = threading.Timer(0.3, server.start)
    starting.start()
    store.write("after", b"written")
    starting.join()
    assert store.read("before") == b"kept"
    assert store.read("after") == b"written"


def test_a_store_that_is_down_is_reported_with_a_remedy(
    server: S3Server, store: ObjectStore
) -> None:
    store.write("one", b"1")
    server.kill()
    try:
        with pytest.raises(StoreUnavailableError, match=r"read one.*check that the store") as down:
            store.read("one")
        assert down.value.details["retry_after_s"]
        with pytest.raises(StoreUnavailableError):
            store.find("")
    finally:
        server.start()
    assert store.read("one") == b"1"


@pytest.mark.slow
def test_every_request_to_a_store_that_hangs_ends(server: S3Server, store: ObjectStore) -> None:
    store.write("one", b"1")
    requests: dict[str, Callable[[], object]] = {
        "look up": lambda: store.size("one"),
        "read": lambda: store.read("one"),
        "list": lambda: store.find(""),
        "write": lambda: store.write("one", b"2"),
        "create": lambda: store.create("two", b"2"),
        "delete": lambda: store.delete(["one"]),
    }
    server.suspend()
    try:
        with ThreadPoolExecutor(len(requests)) as threads:
            futures = {what: threads.submit(send) for what, send in requests.items()}
            for what, future in futures.items():
                with pytest.raises(StoreUnavailableError, match=f"{what}.*check that the store"):
                    future.result()
    finally:
        server.resume()
    store.write("one", b"3")
    assert store.read("one") == b"3"


def test_refused_credentials_are_reported_at_once_with_a_remedy(
    server: S3Server, store: ObjectStore
) -> None:
    store.write("one", b"1")
    server.kill()
    server.start(secret="another-secret")
    try:
        with pytest.raises(StoreUnavailableError, match="check the credentials"):
            store.write("one", b"2")
    finally:
        server.kill()
        server.start()
    assert store.read("one") == b"1"


def test_a_server_without_conditional_writes_is_recognised(store: ObjectStore) -> None:
    assert not store.has_conditional_writes("probe")


@pytest.mark.parametrize(
    "location",
    [
        "s3://key:secret@bucket/prefix",
        "s3://bucket/prefix?secret=abc",
        "memory://bucket",
        "s3:///prefix",
        "relative/folder",
    ],
)
def test_locations_that_other_machines_do_not_reach_or_that_hold_secrets_are_refused(
    location: str,
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        check_location("data_url", location)
    assert "secret" not in refused.value.message


def test_paths_are_directories_and_urls_are_object_stores() -> None:
    check_location("data_url", "/data")
    check_location("data_url", "s3://bucket/prefix")
    assert not is_url("/data")
    assert not is_url("file:///data")
    assert is_url("gs://bucket")


def test_a_protocol_without_its_package_is_refused_with_a_remedy() -> None:
    with pytest.raises(InvalidRequestError, match="install"):
        ObjectStore("gs://bucket/prefix")
