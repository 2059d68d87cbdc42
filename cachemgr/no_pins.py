"""Nobody pins memory: what stands in where no GPU copies blocks."""

import numpy as np
import numpy.typing as npt


class NoPins:
    """The null object of `MemoryPins`."""

    def lock(self, memory: npt.NDArray[np.uint8]) -> None:
        """Nothing to do."""

    def unlock(self, memory: npt.NDArray[np.uint8]) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""
