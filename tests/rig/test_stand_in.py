"""The stand-in driver itself: late where a GPU may be late, strict where it is not.

A rule that it does not enforce is a mistake of ours that no test on the rig would show.
"""

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from engines.cuda import Device, open_device
from engines.driver import HostPinning, require_driver
from engines.errors import DeviceError
from tests.rig.driver import OUT_OF_MEMORY
from tests.rig.plugin import Rig


@pytest.fixture
def device(rig: Rig) -> Iterator[Device]:
    """With its context current."""
    opened = open_device(0)
    with opened.current():
        yield opened


@pytest.fixture
def cuda(device: Device) -> Any:
    import pycuda.driver

    return pycuda.driver


def test_a_copy_reads_page_locked_memory_when_it_runs(device: Device) -> None:
    stream, memory = device.stream(), device.allocate(1024)
    source = device.page_locked((256,), np.float32)
    source.array[:] = 1
    stream.upload(memory.address, source.array)
    source.array[:] = 2  # too early: nobody waited
    stream.synchronise()
    target = np.zeros(256, np.float32)
    stream.download(target, memory.address)
    assert (target == 2).all()
    memory.free()
    source.free()
    stream.close()


def test_a_copy_takes_pageable_memory_along(rig: Rig, device: Device) -> None:
    stream, memory = device.stream(), device.allocate(1024)
    source = np.ones(256, np.float32)
    before = rig.gpu.pageable_copies
    stream.upload(memory.address, source)
    source[:] = 2
    target = np.zeros(256, np.float32)
    stream.download(target, memory.address)  # pageable: there when the call returns
    assert (target == 1).all()
    assert rig.gpu.pageable_copies - before == 2
    memory.free()
    stream.close()


def test_fresh_memory_is_not_a_number(device: Device) -> None:
    stream, memory = device.stream(), device.allocate(1024)
    target = np.zeros(512, np.float16)
    stream.download(target, memory.address)
    assert np.isnan(target).all()
    memory.free()
    stream.close()


def test_streams_run_apart_until_an_event_joins_them(cuda: Any, device: Device) -> None:
    first, second, memory = cuda.Stream(1), cuda.Stream(1), cuda.mem_alloc(4)
    target = cuda.pagelocked_empty(1, np.uint32)
    target[:] = 0
    cuda.memset_d32_async(int(memory), 7, 1, first)
    cuda.memcpy_dtoh_async(target, memory, second)
    second.synchronize()
    assert target[0] == 0xFFFFFFFF, "the second stream did not wait"
    cuda.memset_d32_async(int(memory), 8, 1, first)
    mark = cuda.Event(cuda.event_flags.DISABLE_TIMING)
    mark.record(first)
    second.wait_for_event(mark)
    cuda.memcpy_dtoh_async(target, memory, second)
    second.synchronize()
    assert target[0] == 8
    assert first.is_done()
    target.base.free()
    memory.free()


def test_memory_is_counted_to_the_byte(rig: Rig, cuda: Any, device: Device) -> None:
    held, (free, total) = rig.gpu.held, device.memory()
    rig.gpu.restart_peak()
    first, second = cuda.mem_alloc(1000), cuda.mem_alloc(3)
    assert rig.gpu.held.device_bytes - held.device_bytes == 1003
    assert device.memory() == (free - 1003, total)
    first.free()
    second.free()
    assert rig.gpu.held == held
    assert rig.gpu.peak_bytes - held.device_bytes == 1003
    with pytest.raises(cuda.MemoryError):
        cuda.mem_alloc(total + 1)


@pytest.mark.parametrize("address", [0x1234, None])
def test_freeing_what_is_no_allocation_is_seen(rig: Rig, device: Device, address: int | None) -> None:
    memory = device.allocate(512)
    library = rig.gpu._library
    if address is None:  # twice
        memory._allocation.free()
        address = memory.address
        memory._allocation = None
    else:
        memory.free()
    assert library.cuMemFree_v2(ctypes.c_size_t(address)) == 1
    assert rig.gpu.take_complaints() == [f"cuMemFree: {address:#x} is no live allocation"]


def test_a_copy_may_not_leave_its_allocation(rig: Rig, cuda: Any, device: Device) -> None:
    stream, memory = cuda.Stream(1), cuda.mem_alloc(1024)
    room = np.zeros(2048, np.uint8)
    copy = cuda.Memcpy3D()
    copy.set_src_host(room)
    copy.set_dst_device(int(memory))
    copy.width_in_bytes, copy.height, copy.depth = 32, 4, 2
    copy.src_pitch, copy.src_height = 32, 4
    copy.dst_pitch, copy.dst_height = 128, 4  # (1 · 4 + 3) · 128 + 32 = 928 bytes
    copy(stream)
    copy.dst_pitch = 144
    with pytest.raises(cuda.LogicError, match="invalid argument"):
        copy(stream)
    copy.dst_pitch = 16  # rows would overlap
    with pytest.raises(cuda.LogicError, match="invalid argument"):
        copy(stream)
    with pytest.raises(cuda.LogicError):
        cuda.memcpy_htod_async(int(memory) + 1000, room[:100], stream)
    with pytest.raises(cuda.LogicError):
        cuda.memset_d8(int(memory) + 1, 0, 1024)
    assert len(rig.gpu.take_complaints()) == 4
    stream.synchronize()
    memory.free()


def test_page_locked_memory_ends_where_it_was_registered(rig: Rig, cuda: Any, device: Device) -> None:
    stream, memory = device.stream(), device.allocate(8192)
    host, pinning = np.zeros(8192, np.uint8), HostPinning()
    start = host.ctypes.data
    pinning.register(start, 4096)
    with pytest.raises(cuda.LogicError):
        stream.upload(memory.address, host[2048:6144])
    with pytest.raises(DeviceError, match="already mapped"):
        pinning.register(start + 4000, 4096)
    assert rig.gpu.held.registered_bytes == 4096
    pinning.unregister(start)
    stream.upload(memory.address, host[2048:6144])
    assert len(rig.gpu.take_complaints()) == 1
    memory.free()
    stream.close()


def test_a_thread_without_a_context_can_do_nothing(rig: Rig, cuda: Any, device: Device) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        for job in (lambda: cuda.mem_alloc(4), cuda.mem_get_info):
            try:
                job()
            except cuda.Error as error:
                errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert ["invalid device context" in str(error) for error in errors] == [True, True]
    assert [line.split(":")[0] for line in rig.gpu.take_complaints()] == ["cuMemAlloc", "cuMemGetInfo"]


def test_a_call_fails_on_cue(rig: Rig, cuda: Any, device: Device) -> None:
    rig.gpu.fail("cuStreamCreate", nth=2, result=OUT_OF_MEMORY)
    stream = cuda.Stream(1)
    with pytest.raises(cuda.MemoryError):
        cuda.Stream(1)
    del stream
    rig.gpu.fail("cuMemAlloc", nth=3, times=2)
    kept = [cuda.mem_alloc(1), cuda.mem_alloc(1)]
    with pytest.raises(cuda.MemoryError):  # pycuda tried twice
        cuda.mem_alloc(1)
    kept.append(cuda.mem_alloc(1))
    for memory in kept:
        memory.free()


def test_kernels_of_a_graph_run_at_each_launch(rig: Rig, cuda: Any, device: Device) -> None:
    from cuda.bindings import driver

    stream, runs = cuda.Stream(1), []
    queue = driver.CUstream(int(stream.handle))
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    assert driver.cuStreamBeginCapture(queue, mode)[0] == 0
    assert rig.gpu.launch(int(stream.handle), lambda: runs.append(1)) == 0
    result, graph = driver.cuStreamEndCapture(queue)
    assert (int(result), runs) == (0, []), "recording runs nothing"
    _, recorded = driver.cuGraphInstantiate(graph, 0)
    driver.cuGraphDestroy(graph)
    for _ in range(3):
        driver.cuGraphLaunch(recorded, queue)
    assert runs == []
    stream.synchronize()
    assert runs == [1, 1, 1]
    driver.cuGraphExecDestroy(recorded)


@pytest.mark.parametrize(
    ("unsafe", "complaint"),
    [
        ("mem_alloc", "cuMemAlloc while a stream captures"),
        ("synchronize", None),
    ],
)
def test_what_may_wait_breaks_a_capture(
    rig: Rig, cuda: Any, device: Device, unsafe: str, complaint: str | None
) -> None:
    from cuda.bindings import driver

    stream = cuda.Stream(1)
    queue = driver.CUstream(int(stream.handle))
    driver.cuStreamBeginCapture(queue, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    with pytest.raises(cuda.Error, match="when stream is capturing"):
        cuda.mem_alloc(4) if unsafe == "mem_alloc" else stream.synchronize()
    result, _ = driver.cuStreamEndCapture(queue)
    assert result == driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    assert rig.gpu.take_complaints() == ([complaint] if complaint else [])


def test_a_kernel_that_fails_fails_the_wait(rig: Rig, cuda: Any, device: Device) -> None:
    stream = cuda.Stream(1)
    assert rig.gpu.launch(int(stream.handle), lambda: 1 // 0) == 0
    with pytest.raises(cuda.LaunchError):
        stream.synchronize()
    with pytest.raises(cuda.LaunchError):
        stream.synchronize()  # and so on until the process ends
    assert isinstance(rig.gpu.failures[0], ZeroDivisionError)
    assert "ZeroDivisionError" in rig.gpu.take_complaints()[0]
    rig.gpu.forgive()


def test_unplugged_there_is_no_gpu(rig: Rig) -> None:
    rig.gpu.plug(devices=2, capability=(9, 0), name="Two of a kind", total=10**9)
    assert require_driver(1).compute_capability == "9.0"
    assert require_driver(1).name == "Two of a kind"
    rig.gpu.unplug()
    with pytest.raises(DeviceError, match="expected a GPU, found none"):
        require_driver()
