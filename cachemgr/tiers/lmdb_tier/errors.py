"""What goes wrong between the tier and its disk; nothing of it leaves this package.

LmdbTrouble       the folder or the disk refuses: tried again later
├── MapIsFull     no run of free pages is long enough
├── DiskIsFull    the file may not grow any more
├── MustReopen    it failed in the middle of a commit: what is on disk is whole, what is in memory may not be
└── StoreBroken   what is in the files is not what LMDB writes: begun anew by who writes it
"""


class LmdbTrouble(Exception):
    """Root of the tree; its text is one line."""


class MapIsFull(LmdbTrouble):
    """A transaction found no room and changed nothing."""


class DiskIsFull(LmdbTrouble):
    """A transaction wanted more of the disk than there is, and changed nothing."""


class MustReopen(LmdbTrouble):
    """The library wants the files closed and opened again."""


class StoreBroken(LmdbTrouble):
    """The files cannot be used any more."""
