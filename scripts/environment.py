"""The one place where the command reads its environment variables."""

import os


def inherited() -> dict[str, str]:
    """A copy of this process's environment, to build a child's from."""
    return dict(os.environ)
