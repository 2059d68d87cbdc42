"""One answer as a client saw it arrive."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class StreamedAnswer:
    """What one stream brought. `arrivals`: seconds from the request to every piece of text."""

    text: str = ""
    finish_reason: str = ""
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    release: str = ""
    arrivals: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Seconds from sending the request to the first piece of text."""
        return self.arrivals[0] if self.arrivals else self.seconds
