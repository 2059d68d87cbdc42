"""Whether this machine can run the tests of a GPU node at all; the only file collected where nobody asked."""

import pytest

from scripts.bench import gpu_ready


def test_a_gpu_and_its_libraries_are_here(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--gpu", default=False):
        pytest.skip("the tests of a GPU node need an NVIDIA GPU: run `make test-gpu` there")
    print(f"\n{gpu_ready.require().line}")
