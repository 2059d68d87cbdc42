"""Builds what TensorRT runs: a plan for this machine's GPU, and the report of its layers.

Weights go through a file that is mapped while TensorRT reads it and gone afterwards: the build holds one copy
of them in memory of its own, the plan's.

Needs a GPU, TensorRT and pycuda: `require_gpu` says so before anything is read or downloaded.
"""

import math
from collections.abc import Callable
from pathlib import Path

from engines.build_files import Progress, map_file, map_weights, write_weights
from engines.build_options import BuildOptions, Built
from engines.cuda import open_device
from engines.decoder import Decoder
from engines.driver import GPU_EXTRAS, GpuInfo
from engines.errors import DeviceError
from engines.graph_tensorrt import Precision, build_graph
from engines.layer_report import REPORT_FILE, LayerReport
from engines.manifest import ProfileInfo, TensorRTInfo
from engines.onnx_emit import WEIGHTS_FILE
from engines.plan_builder import build_plan, inspect_plan
from engines.plan_header import parse_plan_header
from engines.tensorrt_network import inspect_network, parse_network
from engines.trt import deserialise, load_tensorrt, messages, trt_logger

PLAN_FILE = "model.plan"

_PRECISIONS: dict[str, Precision] = {"float16": "float16", "bfloat16": "bfloat16", "int4": "int4"}


def require_gpu(device: int) -> GpuInfo:
    """The GPU that a plan would be built on; DeviceError says what is missing and what to install."""
    info = open_device(device).info
    trt = load_tensorrt()
    if not hasattr(trt.LayerType, "KV_CACHE_UPDATE"):  # new in 10.15; the first of its kind that we need
        raise DeviceError(f"TensorRT: expected 10.15 or later, found {trt.__version__}: {GPU_EXTRAS}")
    return info


def build_tensorrt(decoder: Decoder, folder: Path, *, options: BuildOptions, progress: Progress) -> Built:
    """Write plan and report into `folder`. DeviceError, BuildError, OSError."""
    gpu = require_gpu(options.plan.device)
    errors: dict[str, float] = {}
    with open_device(gpu.ordinal).current():
        digest = _write_plan(decoder, folder, options=options, gpu=gpu, errors=errors, progress=progress)
        progress("inspect plan", 0.0)
        report, profiles = _inspect(decoder, folder, options=options, errors=errors)
    (folder / REPORT_FILE).write_bytes(report.encode())
    info = TensorRTInfo(
        version=parse_plan_header(map_file(folder / PLAN_FILE)).library,
        compute_capability=gpu.compute_capability,
        gpu_name=gpu.name,
        profiles=profiles,
        built_for=options.plan.built_for,
        weight_error=round(_root_mean_square(errors), 5),
    )
    return Built(
        graph=PLAN_FILE,
        files=(PLAN_FILE, REPORT_FILE),
        weights_digest=digest,
        exact=False,  # kernels vary with the shape of a step
        kernel_class="",
        tensorrt=info,
    )


def _write_plan(
    decoder: Decoder,
    folder: Path,
    *,
    options: BuildOptions,
    gpu: GpuInfo,
    errors: dict[str, float],
    progress: Progress,
) -> str:
    trt, logger = load_tensorrt(), trt_logger()
    graph = build_graph(
        decoder,
        positions=options.positions,
        precision=_PRECISIONS[options.precision],
        weight_errors=errors,
    )
    weights = folder / WEIGHTS_FILE
    digest = write_weights(weights, graph, progress=progress)
    point = messages.count
    builder = trt.Builder(logger)
    parsed = parse_network(trt, builder, logger, graph=graph, weights=map_weights(weights, graph))
    weights.unlink()  # the mapping keeps the bytes; the name must not outlive a killed build
    inspect_network(trt, parsed.network, decoder.config.geometry)
    plan = build_plan(
        trt,
        builder,
        parsed,
        options=options,
        gpu_name=gpu.name,
        messages=lambda: messages.after(point),
        report=_share(progress),
    )
    with (folder / PLAN_FILE).open("wb") as file:
        file.write(plan)
    return digest


def _inspect(
    decoder: Decoder, folder: Path, *, options: BuildOptions, errors: dict[str, float]
) -> tuple[LayerReport, tuple[ProfileInfo, ...]]:
    runtime, engine = deserialise(map_file(folder / PLAN_FILE))
    try:
        return inspect_plan(
            load_tensorrt(),
            engine,
            options=options,
            geometry=decoder.config.geometry,
            weight_errors=errors,
        )
    finally:
        del engine  # before the runtime that made it
        del runtime


def _share(progress: Progress) -> Callable[[float], None]:
    return lambda done: progress("choose kernels", done)


def _root_mean_square(errors: dict[str, float]) -> float:
    return math.sqrt(sum(error**2 for error in errors.values()) / len(errors)) if errors else 0.0
