"""Kinds of blocks that are alike in how soon they are asked for again: how often seen, and where they hang.

A conversation's blocks come back together when its next turn comes, so what tells blocks apart is how often
they were seen; and of those seen once, whether they began a chain, continued one, or hang further on.
"""

import bisect
from typing import Final

LEFT_BEHIND: Final = 0
"""Its chain went on without it, along another branch."""
ROOT, NEXT, TAIL, BRANCH = 1, 2, 3, 4
"""Seen once. The front of a chain of its own; the first block by which a chain grew; what follows that; and
what hangs on a front that many share."""
SEEN_OFTEN: Final = 5
"""From here on: seen 2, 3, 4–5, 6–8, 9–16 times, and more."""
FEW: Final = 4
"""A chain that was seen so often at most is one conversation's, not a front that many share."""

_STEPS = (2, 3, 4, 6, 9, 17)
CLASSES: Final = SEEN_OFTEN + len(_STEPS)
MOST_SEEN: Final = 255

OF_COUNT: Final = [0, 0] + [
    SEEN_OFTEN + bisect.bisect_right(_STEPS, seen) - 1 for seen in range(2, MOST_SEEN + 1)
]
"""Class of a block by how often it was seen, from 2 up."""


AFTER_ONE: Final = [BRANCH, ROOT, TAIL, TAIL, *[BRANCH] * (CLASSES - BRANCH)]
"""Class of a block that was never seen before, by that of the block before it, which was seen once."""


def class_after(parent_class: int, parent_count: int) -> int:
    """Class of a block that was never seen before, by what is known of the block before it."""
    if parent_count == 1:
        return AFTER_ONE[parent_class]
    return NEXT if parent_count <= FEW else BRANCH
