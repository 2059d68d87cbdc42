"""Builds what ONNX Runtime runs: a graph with the weights beside it."""

from pathlib import Path
from typing import cast

from engines.build_files import Progress, write_weights
from engines.build_options import BuildOptions, Built
from engines.decoder import Decoder, weight_shapes
from engines.graph_onnxruntime import Precision, build_onnxruntime_graph
from engines.kernel_class import kernel_class
from engines.onnx_emit import WEIGHTS_FILE
from engines.smoothing import SmoothedDecoder, smooth

GRAPH_FILE = "graph.onnx"


def build_onnxruntime(decoder: Decoder, folder: Path, *, options: BuildOptions, progress: Progress) -> Built:
    """Write graph and weights into `folder`. BuildError."""
    progress("measure activations", 0.0)
    quantised = options.precision != "fp32"
    smoothed = smooth(decoder) if quantised else SmoothedDecoder(decoder, embed_divisor=None)
    decoder = smoothed.decoder
    graph = build_onnxruntime_graph(
        decoder,
        precision=cast(Precision, options.precision),
        positions=options.positions,
        embed_divisor=smoothed.embed_divisor,
    )
    inside = [
        (name, decoder.weights[name])
        for name, shape in weight_shapes(decoder.config).items()
        if len(shape) == 1  # norms and biases, which the graph holds itself
    ]
    digest = write_weights(folder / WEIGHTS_FILE, graph, inside=inside, progress=progress)
    (folder / GRAPH_FILE).write_bytes(graph.model_bytes())
    return Built(
        graph=GRAPH_FILE,
        files=(GRAPH_FILE, WEIGHTS_FILE),
        weights_digest=digest,
        exact=True,
        kernel_class=kernel_class(),
    )
