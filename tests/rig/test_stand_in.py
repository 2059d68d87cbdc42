"""The stand-in driver under real pycuda: late copies, exact accounts, bounds."""

import numpy as np

from engines.cuda import open_device
from tests.rig.plugin import Rig


def test_a_copy_reads_its_source_when_it_runs(rig: Rig) -> None:
    device = open_device(0)
    with device.current():
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
