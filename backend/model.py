"""What Triton's Python stub imports as top-level module `model`: finds the rooms beside it, and hands over.

The stub puts this folder at the end of sys.path; the front is where it must be, so that no other installed
package named `backend` or `engines` is taken instead. Python packages installed beside the rooms come next.
"""

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(_HERE), str(_HERE / "site-packages")]

from backend.triton import TritonPythonModel  # noqa: E402  (the path must be set first)

__all__ = ["TritonPythonModel"]
