"""The answering end of the pipe to a peer: a JSON line for a JSON line. Standard library only."""

import json
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

Answer = dict[str, Any]


def serve(ops: Mapping[str, Callable[..., Answer]], questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the other side closes the pipe; an exception becomes {"error": ...}."""
    for line in questions:
        answers.write(json.dumps(_answer(ops, json.loads(line))).encode() + b"\n")
        answers.flush()


def _answer(ops: Mapping[str, Callable[..., Answer]], question: Answer) -> Answer:
    op = question.pop("op")
    if op == "hello":
        return {"ready": True}
    if op not in ops:
        return {"error": f"unknown op {op!r}"}
    try:
        return ops[op](**question)
    except Exception as error:  # of the peer: the next question may still work
        return {"error": f"{type(error).__name__}: {error}"}
