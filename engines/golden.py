"""Finds the golden token of a new engine: a prompt whose best next token is clearly ahead of the second."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from engines.contract import Engine, LaneId, Logits
from engines.errors import BuildError
from engines.manifest import Golden

GOLDEN_MARGIN = 1.0

_TEXTS = (
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    "Monday, Tuesday, Wednesday, Thursday, Friday,",
    "a b c d e f g h i j k l m n o p",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Germany is",
    "Once upon a",
)
_LANE = LaneId(0)


def find_golden(engine: Engine, tokenizer_json: bytes) -> Golden:
    """The first prompt whose best token is at least GOLDEN_MARGIN above the second, by prefill and by decode.

    Both are asked for when the release is opened. BuildError if there is none.
    """
    widest = 0.0
    for prompt in _prompts(engine, tokenizer_json):
        token, margin = _best(engine.prefill(_LANE, prompt, 0))
        widest = max(widest, margin)
        if margin >= GOLDEN_MARGIN:
            last = len(prompt) - 1
            again, _ = _best(engine.decode([_LANE], prompt[last:], np.array([last], dtype=np.int64)))
            if again == token:
                return Golden(prompt=tuple(map(int, prompt)), token=token, margin=round(margin, 3))
    raise BuildError(
        f"golden token: no prompt separates its best two tokens by {GOLDEN_MARGIN}, "
        f"the widest by {widest:.3f}"
    )


def _prompts(engine: Engine, tokenizer_json: bytes) -> Iterator[npt.NDArray[np.int64]]:
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    for text in _TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids[: engine.spec.max_prefill_tokens]
        if ids:
            yield np.array(ids, dtype=np.int64)


def _best(logits: Logits) -> tuple[int, float]:
    """The best token and how far it is ahead of the second."""
    row = np.asarray(logits.array)[0]
    if not np.isfinite(row).all():
        raise BuildError("weights: the engine built from them computes logits that are not finite")
    second, first = np.sort(row)[-2:]
    return int(row.argmax()), float(first - second)
