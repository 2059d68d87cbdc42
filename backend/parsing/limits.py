"""How much a request may ask for."""

from typing import Final

import msgspec

FORWARDED_HEADERS: Final = frozenset({"authorization"})


class RequestLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of one model. Header names in `forwarded_headers` are lower case."""

    max_seq_len: int
    vocab_size: int
    default_max_tokens: int
    max_prompt_bytes: int
    max_stop_words: int = 64
    max_stop_word_bytes: int = 256
    max_cache_salt_bytes: int = 256
    forwarded_headers: frozenset[str] = FORWARDED_HEADERS
