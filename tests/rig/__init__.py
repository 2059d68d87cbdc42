"""A GPU that is none: real pycuda and cuda-bindings over a stand-in libcuda, and a tensorrt double.

    def test_x(rig):                           # of tests/conftest.py: a GPU of 2 GiB, capability 8.0
        rig.gpu.plug(capability=(9, 0), total=64 * 2**20)      # another one
        plan = make_plan(decoder, positions=256, lanes=4, chunk=64)     # tests.rig.plans
        engine = TensorRTEngine(...)           # `import tensorrt`, `import pycuda.driver` work as with a GPU
        rig.gpu.held                           # bytes, allocations, streams, events, graphs that live
        rig.gpu.fail("cuMemAlloc", nth=3, times=2)     # the third call from now fails: out of memory
        rig.trt.fail("execute_async_v3")       # the next step is refused (False, and a line in the logger)

`rig` skips with the reason where the machine lacks compilers or a package index; `module_rig` is
the same for a module. When it ends, nothing may be left allocated, pushed, or complained of
(`rig.gpu.take_complaints()`).

    libcuda.c memory.c streams.c   the stand-in: strict where a GPU would be fast, late where it may be
    build.py pycuda_build.py       build it and pycuda once, under build/rig
    driver.py                      the stand-in as tests see it
    tensorrt_double.py             the module `tensorrt`, over step_runs.py (ONNX Runtime) and plans.py
    builder_double.py              its builder half: `build_release(target="tensorrt")` makes such plans
    releases.py                    releases built so, opened as they are or with a changed graph
    uses.py                        what our code uses of TensorRT, for the comparison in test_signatures.py
    plugin.py                      the fixtures
"""
