"""Copies on several streams, and in batches where host memory is pinned."""

import random
import threading
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from plexrl.statemanager.device.cuda.bindings import BATCH_COPIES_MAX, BoundDriver
from plexrl.statemanager.device.cuda.copy_streams import STREAMS_PER_DIRECTION
from plexrl.statemanager.device.cuda.device import CudaDevices
from plexrl.statemanager.device.cuda.driver import DeviceCopy
from plexrl.statemanager.device.mapping import map_zero, unmap
from plexrl.statemanager.device.memory import ByteRun
from tests.statemanager.device_rigs import HostBlock
from tests.statemanager.emulated_cuda import EmulatedCuda

MIB = 1 << 20


@pytest.fixture
def driver() -> Iterator[EmulatedCuda]:
    made = EmulatedCuda(f"streams-{uuid.uuid4().hex[:8]}")
    made.enter(0)
    yield made
    made.check_nothing_left()


def test_runs_of_pinned_memory_are_one_batch_and_others_single_copies(driver: EmulatedCuda) -> None:
    devices = CudaDevices(driver)
    pinned = map_zero(MIB)
    devices.register_host(pinned, MIB)
    loan = devices.allocate(MIB, device=0, uid=0)
    contents = [random.Random(index).randbytes(1000) for index in range(8)]
    pageable = [HostBlock(each) for each in contents]
    loan.write([block.run(2000 * index) for index, block in enumerate(pageable)])
    assert driver.batches == []
    loan.read([ByteRun(2000 * index, pinned + 3000 * index, 1000) for index in range(8)])
    assert driver.batches == [8]
    other = HostBlock(bytes(1000))
    loan.write(
        [
            *(ByteRun(9000 * index, pinned + 3000 * index, 1000) for index in range(8)),
            other.run(80000),
        ]
    )
    assert driver.batches == [8, 8]
    found = HostBlock(bytes(1000))
    for index, each in enumerate(contents):
        loan.read([found.run(9000 * index)])
        assert found.contents() == each
    devices.free(loan)
    devices.unregister_host(pinned, MIB)
    unmap(pinned, MIB)
    devices.close()


def test_a_move_waits_for_its_own_copies_only(
    driver: EmulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy hangs in each direction; others go on, both ways, on other streams."""
    devices = CudaDevices(driver)
    loan = devices.allocate(MIB, device=0, uid=0)
    waits, hangs = threading.Event(), threading.Semaphore(0)
    plain = driver.synchronize_stream
    held: set[int] = set()

    def synchronize(stream: int) -> None:
        if threading.current_thread().name == "hangs":
            held.add(stream)
            hangs.release()
            waits.wait()
        assert stream not in held or threading.current_thread().name == "hangs"
        plain(stream)

    monkeypatch.setattr(driver, "synchronize_stream", synchronize)
    slow = [HostBlock(b"slow"), HostBlock(b"....")]
    threads = [
        threading.Thread(target=loan.write, args=([slow[0].run(0)],), name="hangs"),
        threading.Thread(target=loan.read, args=([slow[1].run(MIB // 2)],), name="hangs"),
    ]
    for thread in threads:
        thread.start()
        hangs.acquire()
    for _ in range(2 * STREAMS_PER_DIRECTION):
        block, target = HostBlock(b"quick"), HostBlock(b".....")
        loan.write([block.run(4096)])
        loan.read([target.run(4096)])
        assert target.contents() == b"quick"
    waits.set()
    for thread in threads:
        thread.join()
    found = HostBlock(b"....")
    loan.read([found.run(0)])
    assert found.contents() == b"slow"
    devices.free(loan)
    devices.close()


class FakeApi:
    """The bindings' functions for copies, which note their calls."""

    def __init__(self, batch_result: object) -> None:
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=0)
        self.CUmemcpyAttributes = SimpleNamespace
        self.CUmemcpySrcAccessOrder = SimpleNamespace(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM=1)
        self.CUdeviceptr = int
        self.calls: list[tuple[Any, ...]] = []
        self._batch_result = batch_result

    def cuMemcpyBatchAsync(self, *given: Any) -> tuple[Any]:
        if isinstance(self._batch_result, Exception):
            raise self._batch_result
        if self._batch_result == 0:
            self.calls.append(("batch", list(zip(*given[:3], strict=True)), *given[3:]))
        return (self._batch_result,)

    def cuMemcpyDtoHAsync(self, *given: int) -> tuple[int]:
        self.calls.append(("to host", *given))
        return (0,)


def bound(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> BoundDriver:
    monkeypatch.setattr("plexrl.statemanager.device.cuda.bindings.load_bindings", lambda: api)
    return BoundDriver()


COPIES: list[DeviceCopy] = [(4096 * index, 8192 * index, 10) for index in range(1, 4)]


def test_a_batch_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    api = FakeApi(0)
    driver = bound(api, monkeypatch)
    driver.copy_batch(COPIES * BATCH_COPIES_MAX, 7, to_host=True)
    assert [call[2] for call in api.calls] == [BATCH_COPIES_MAX] * 3
    kind, copies, _, (how,), firsts, count, stream = api.calls[0]
    assert (kind, copies[:3], firsts, count, stream) == ("batch", COPIES, [0], 1, 7)
    assert how.srcAccessOrder == 1
    driver.copy_batch(COPIES[:1], 7, to_host=True)
    assert api.calls[-1] == ("to host", *COPIES[0], 7)


@pytest.mark.parametrize(
    "result",
    [
        RuntimeError('Function "cuMemcpyBatchAsync" not found'),
        TypeError("takes 9 arguments"),
        SimpleNamespace(name="CUDA_ERROR_NOT_SUPPORTED"),
    ],
    ids=["older driver", "other bindings", "refused"],
)
def test_without_batches_each_copy_is_a_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, result: object
) -> None:
    api = FakeApi(result)
    driver = bound(api, monkeypatch)
    for _ in range(2):
        driver.copy_batch(COPIES, 7, to_host=True)
    assert api.calls == [("to host", *copy, 7) for copy in COPIES] * 2
    assert len(caplog.records) == 1, "batches are tried once"
