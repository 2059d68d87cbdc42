"""From token ids to the text a client sees, as early as it is certain and never half a character.

Held back: bytes that are not yet a code point; the last grapheme cluster while it is not ASCII (an accent, a
skin tone or the second half of a flag may follow); a tail that may still become a stop word. A stop word
ends the text and is not part of it; one that ends within the first `min_tokens` tokens is plain text.

Invariants
- push(t1) + … + push(tn) + finish() is the decoding of t1 … tn, cut at its first stop word that counts,
  however long n is.
- Apart from a cluster of more than MAX_CLUSTER code points, every delta ends at the end of a cluster or at
  an ASCII character.

Threads: one owner.
"""

from typing import Final

import regex

from backend.text.stops import StopMatcher, StopWords
from backend.text.token_text import TokenText

MAX_CLUSTER: Final = 64
"""Code points of one cluster that are held back at most: a model may emit combining marks without end."""

_CLUSTERS: Final = regex.compile(r"\X")


class StreamDecoder:
    """Incremental detokeniser of one generation. Look at `stopped` after every push and after finish."""

    __slots__ = ("_emitted", "_held", "_matcher", "_tokens", "_unstoppable", "stopped")

    def __init__(
        self, tokens: TokenText, stop_words: StopWords | None = None, *, min_tokens: int = 0
    ) -> None:
        self._tokens = tokens
        self._matcher = StopMatcher(stop_words) if stop_words else None
        self._held = ""
        self._emitted = 0
        self._unstoppable = min_tokens
        self.stopped = False
        """True once a stop word was found: the text is complete, later tokens add nothing."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often empty."""
        if self.stopped:
            return ""
        text = self._tokens.push(token_id)
        unstoppable = self._unstoppable > 0
        if unstoppable:
            self._unstoppable -= 1
        if not text:
            return ""
        if self._matcher is not None:
            return self._advance_matching(self._matcher, text, unstoppable=unstoppable)
        if not self._held and text.isascii():
            return text
        self._held += text
        return self._emit(len(self._held), final=False)

    def finish(self) -> str:
        """What was still held back; the text ends here. `stopped` may become True. Idempotent."""
        if self.stopped:
            return ""
        text = self._tokens.flush()
        if self._matcher is None:
            self._held += text
            return self._emit(len(self._held), final=True)
        out = self._advance_matching(self._matcher, text, unstoppable=self._unstoppable > 0)
        if self.stopped:
            return out
        if self._matcher.start is None:
            return out + self._emit(len(self._held), final=True)
        return out + self._stop(self._matcher.start)

    def _advance_matching(self, matcher: StopMatcher, text: str, *, unstoppable: bool) -> str:
        self._held += text
        if unstoppable:
            matcher.skip(text)
        elif matcher.feed(text):
            assert matcher.start is not None
            return self._stop(matcher.start)
        return self._emit(matcher.clear - self._emitted, final=False)

    def _stop(self, start: int) -> str:
        self.stopped = True
        out, self._held = self._held[: start - self._emitted], ""
        return out

    def _emit(self, length: int, *, final: bool) -> str:
        """Let go of at most the first `length` characters held."""
        out = self._held[:length]
        if out and not final and not out[-1].isascii():
            last = len(_CLUSTERS.findall(out)[-1])
            if last <= MAX_CLUSTER:
                out = out[:-last]
        if out:
            self._held = self._held[len(out) :]
            self._emitted += len(out)
        return out
