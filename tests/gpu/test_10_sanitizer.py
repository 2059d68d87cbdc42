"""(10) Twenty steps under compute-sanitizer: no kernel reads or writes outside what is allocated."""

import sys

from tests.gpu.node import Node
from tests.gpu.sanitizer import find_sanitizer, memcheck
from tests.gpu.torch_reference import Precision


def test_memcheck_finds_nothing(node: Node, precision: Precision) -> None:
    sanitizer = find_sanitizer()
    release, key = node.release(precision), node.public_key
    node.close()
    program = [sys.executable, "-m", "tests.gpu.twenty_steps", str(release), str(key)]
    print(memcheck(sanitizer, program))
