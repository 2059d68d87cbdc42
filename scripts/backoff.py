"""How long to wait before trying again: longer each time, never too long, short again after a calm while."""


class Backoff:
    """Doubles from `first_s` to `limit_s`; forgets once things went well for `calm_s` seconds."""

    def __init__(self, *, first_s: float = 1.0, limit_s: float = 30.0, calm_s: float = 60.0) -> None:
        self._first_s = first_s
        self._limit_s = limit_s
        self._calm_s = calm_s
        self._well_since: float | None = None
        self.failures = 0

    def next_delay(self, now: float) -> float:
        """Note a failure at `now` (monotonic seconds); the delay before the next try."""
        if self._well_since is not None and now - self._well_since >= self._calm_s:
            self.failures = 0
        self._well_since = None
        self.failures += 1
        return min(self._limit_s, self._first_s * float(2 ** min(self.failures - 1, 16)))

    def recovered(self, now: float) -> None:
        """A try worked. How long a try takes is no calm: it may take minutes to fail."""
        self._well_since = now
