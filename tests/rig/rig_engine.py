"""The TensorRT engine over the stand-in driver and the tensorrt double: four lanes of 384 positions."""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from engines.contract import EngineSpec
from engines.cuda import open_device
from engines.decoder import Decoder
from engines.graph_tensorrt import Precision
from engines.manifest import EngineManifest, FileEntry, Golden, ProfileInfo, TensorRTInfo
from engines.onnx_emit import EmittedGraph
from engines.options import EngineOptions
from engines.tensorrt_engine import TensorRTEngine
from tests.rig.graph_engine import BLOCK, CHUNK, LANES, POSITIONS
from tests.rig.plans import VERSION, make_plan

LIMIT_S = 10.0


class RigModel:
    """A plan of the double, and engines opened from it."""

    def __init__(
        self, decoder: Decoder, precision: Precision, *, lanes: int = LANES, graph: EmittedGraph | None = None
    ) -> None:
        self.plan = make_plan(
            decoder, positions=POSITIONS, precision=precision, lanes=lanes, chunk=CHUNK, graph=graph
        )
        digest = hashlib.sha256(self.plan).hexdigest()
        profiles = [
            ProfileInfo(
                rows=rows, tokens=tokens, least_window=256, window=POSITIONS, activation_bytes=1 << 20
            )
            for rows, tokens in ((1, CHUNK), (lanes, 1))
        ]
        self.manifest = EngineManifest(
            format="tensorcache-engine/1", model="rig", release=1, runtime="tensorrt", graph="model.plan",
            files={"model.plan": FileEntry(digest, len(self.plan))}, geometry=decoder.config.geometry,
            precision=precision, kv_dtype=precision, kv_layout="linear", block_tokens=BLOCK, lanes=lanes,
            max_seq_len=POSITIONS - 1, max_prefill_tokens=CHUNK, exact=False, kv_identity=digest[:32],
            kernel_class="", weights_digest="", tokenizer_digest=digest, eos_token_ids=(0,),
            bos_token_id=None, add_bos=False, chat_template=None,
            golden=Golden(prompt=(1,), token=0, margin=1.0),
            tensorrt=TensorRTInfo(
                version=VERSION, compute_capability="8.0", gpu_name="Stand-in GPU", profiles=profiles
            ),
        )  # fmt: skip

    def open(self, *, cuda_graphs: bool = True, beside: EngineSpec | None = None) -> TensorRTEngine:
        """A warm engine; the caller closes it."""
        options = EngineOptions(cuda_graphs=cuda_graphs)
        files = {"model.plan": memoryview(self.plan)}
        engine = TensorRTEngine(self.manifest, files, options=options, digest="rig", beside=beside)
        for _ in engine.prewarm():
            pass
        return engine


@contextmanager
def copying_stream() -> Iterator[None]:
    """Within the block a thread copies on the device without pause, in a stream of its own."""
    device, stop, going = open_device(0), threading.Event(), threading.Event()

    def copy() -> None:
        with device.current():
            stream, memory = device.stream(), device.allocate(2 << 20)
            stream.upload(memory.address, np.ones(2 << 20, np.uint8))
            while not stop.is_set():
                stream.copy(memory.address + (1 << 20), memory.address, 1 << 20)
                stream.synchronise()
                going.set()
            memory.free()
            stream.close()

    thread = threading.Thread(target=copy, name="copying-stream")
    thread.start()
    try:
        assert going.wait(LIMIT_S), "the other stream did not start"
        yield
    finally:
        stop.set()
        thread.join(LIMIT_S)
    assert not thread.is_alive(), "the other stream did not end"
