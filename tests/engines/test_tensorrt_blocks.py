"""Blocks in and out of a pool on the device, against the same pool in numpy."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.contract import EngineSpec, Geometry, LaneId
from engines.cuda import Device, Stream, open_device
from engines.device_pool import DevicePool, SharedLayer, kv_bytes, layer_bytes
from engines.engine_spec import kv_type
from tests.rig.plugin import Rig

Bytes = npt.NDArray[np.uint8]

DTYPES = ("float16", "bfloat16", "float32")


@st.composite
def specs(draw: st.DrawFn) -> EngineSpec:
    """Small lanes of every shape; each fills a multiple of 256 bytes, as the builder checks."""
    block = draw(st.sampled_from((8, 16, 32)))
    dtype = kv_type(draw(st.sampled_from(DTYPES)))
    heads, dim = draw(st.integers(1, 4)), draw(st.sampled_from((8, 16, 32)))
    blocks = draw(st.integers(2, 6))
    while heads * blocks * block * dim * dtype.itemsize % 256:
        blocks += 1
    return EngineSpec(
        model="m", release=1, digest="d", kv_identity=bytes(16),
        geometry=Geometry(
            layers=draw(st.integers(1, 4)), hidden=8, query_heads=heads, kv_heads=heads, head_dim=dim,
            vocab_size=8,
        ),
        kv_dtype=dtype, block_tokens=block, lanes=draw(st.integers(1, 5)), max_seq_len=blocks * block - 1,
        positions=blocks * block, max_prefill_tokens=8, exact=False,
    )  # fmt: skip


@dataclass(slots=True)
class Pools:
    """The pool on the device and what it must hold."""

    spec: EngineSpec
    device: Device
    stream: Stream
    pool: DevicePool
    model: npt.NDArray[Any]  # [layers, 2, lanes, heads, S, D]

    def bytes_on_device(self) -> Bytes:
        out = np.zeros(self.model.nbytes, np.uint8)
        self.stream.download(out, self.pool.address(0, 0, 0))
        self.stream.synchronise()
        return out

    def block(self, lane: int, block: int) -> npt.NDArray[Any]:
        tokens = self.spec.block_tokens
        return self.model[:, :, lane, :, block * tokens : (block + 1) * tokens]

    @property
    def whole_blocks(self) -> int:
        return self.spec.max_seq_len // self.spec.block_tokens


@contextmanager
def pools(spec: EngineSpec) -> Iterator[Pools]:
    device = open_device(0)
    g = spec.geometry
    shape = (g.layers, 2, spec.lanes, g.kv_heads, spec.positions, g.head_dim)
    model = np.random.default_rng(1).integers(0, 2**16, shape).astype(np.uint16)
    wide = np.random.default_rng(2).integers(0, 2**32, shape, dtype=np.uint32)
    model = wide if spec.kv_dtype.itemsize == 4 else model
    with device.current():
        stream = device.stream()
        pool = DevicePool(device, stream, spec, lanes=spec.lanes)
        made = Pools(spec, device, stream, pool, model)
        assert not made.bytes_on_device().any(), "memory is zero until written"
        stream.upload(pool.address(0, 0, 0), model)
        stream.synchronise()
        try:
            yield made
        finally:
            pool.free()
            stream.close()


Layout = Callable[[int, int], list[Bytes]]


def side_by_side(count: int, size: int) -> list[Bytes]:
    return list(np.zeros((count, size), np.uint8))


def at_a_distance(count: int, size: int) -> list[Bytes]:
    return [row[128 : 128 + size] for row in np.zeros((count, size + 384), np.uint8)]


def backwards(count: int, size: int) -> list[Bytes]:
    return at_a_distance(count, size)[::-1]


def at_odd_addresses(count: int, size: int) -> list[Bytes]:
    return [np.zeros(size + 64, np.uint8)[offset % 63 :][:size] for offset in range(1, count + 1)]


LAYOUTS = (side_by_side, at_a_distance, backwards, at_odd_addresses)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spec=specs(), data=st.data())
def test_blocks_are_those_of_the_same_pool_in_numpy(
    rig: Rig, layout: Layout, spec: EngineSpec, data: st.DataObject
) -> None:
    with pools(spec) as both:
        for _ in range(3):
            first = data.draw(st.integers(0, both.whole_blocks - 1))
            blocks = range(first, data.draw(st.integers(first, both.whole_blocks)))
            lane = data.draw(st.integers(0, spec.lanes - 1))
            buffers = layout(len(blocks), spec.block_nbytes)
            both.pool.export_blocks(both.stream, LaneId(lane), blocks, buffers)
            for block, buffer in zip(blocks, buffers, strict=True):
                expected = np.ascontiguousarray(both.block(lane, block)).reshape(-1).view(np.uint8)
                assert np.array_equal(buffer, expected)
            target = data.draw(st.integers(0, spec.lanes - 1))
            both.pool.import_blocks(both.stream, LaneId(target), blocks, buffers)
            for block, buffer in zip(blocks, buffers, strict=True):
                view = both.block(target, block)
                view[:] = buffer.view(view.dtype).reshape(spec.block_shape)
            assert np.array_equal(both.bytes_on_device(), both.model.reshape(-1).view(np.uint8))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spec=specs())
def test_addresses_are_those_of_numpy_and_aligned(rig: Rig, spec: EngineSpec) -> None:
    g = spec.geometry
    with pools(spec) as both:
        start = both.pool.address(0, 0, 0)
        assert rig.gpu.room(start) == kv_bytes(spec, lanes=spec.lanes) == both.model.nbytes
        for layer in range(g.layers):
            for kind in (0, 1):
                for lane in range(spec.lanes):
                    view = both.model[layer, kind, lane]
                    offset = view.__array_interface__["data"][0] - both.model.__array_interface__["data"][0]
                    address = both.pool.address(layer, kind, lane)
                    assert address - start == offset
                    assert address % 256 == 0
        shared = SharedLayer(both.device, both.stream, spec)
        assert rig.gpu.room(shared.address(g.layers - 1, 1, 0)) == layer_bytes(spec)
        shared.free()
