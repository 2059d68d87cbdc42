"""Rows of the engine: speed against llama.cpp and OpenVINO on the same weights, and the price of int8."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from engines import Engine, LaneId
from scripts.bench.harness import Measurement, Paired, Reading, alternate, timed
from scripts.bench.peers import Peer, PeerKind, open_peer, quicker_variant
from scripts.bench.subject import TEXT, Subject

Tokens = npt.NDArray[np.int64]

FIRST = LaneId(0)
_STEPS = 64
_CONTEXT = 64
_PERPLEXITY_TOKENS = 2048
_WINDOWS = 8


def measurements(subject: Subject) -> list[Measurement]:
    """All measurements of this room."""
    llama, openvino = "llamacpp", "openvino"
    return [
        Measurement(
            (f"engine.prefill512.vs_{llama}",), partial(_prefill, subject, "llamacpp", tokens=512, rounds=5)
        ),
        Measurement(
            (f"engine.decode1.vs_{llama}", f"engine.decode8.vs_{llama}1"), partial(_decode_llamacpp, subject)
        ),
        Measurement(
            (f"engine.prefill2048.vs_{openvino}",),
            partial(_prefill, subject, "openvino", tokens=2048, rounds=4),
        ),
        Measurement((f"engine.decode1.vs_{openvino}",), partial(_decode_openvino, subject)),
        Measurement(("engine.perplexity_vs_fp32",), partial(_perplexity, subject)),
        Measurement(("engine.decode1.s8192_vs_s2048",), partial(_room_of_a_lane, subject)),
    ]


def prefill_seconds(engine: Engine, tokens: Tokens) -> float:
    """Seconds to prefill a prompt from position 0 in the engine's largest chunks."""
    return timed(lambda: prefill(engine, tokens, FIRST))


def prefill(engine: Engine, tokens: Tokens, lane: LaneId) -> int:
    """Prefill a prompt from position 0; the greedy next token."""
    chunk = engine.spec.max_prefill_tokens
    token = 0
    for start in range(0, len(tokens), chunk):
        logits = engine.prefill(lane, tokens[start : start + chunk], start)
        token = int(logits.array[0].argmax())
    return token


def decode_seconds(engine: Engine, prompts: Sequence[Tokens], *, steps: int = _STEPS) -> float:
    """Seconds of `steps` greedy decode steps of all prompts together, one lane each, after their prefill."""
    lanes = [LaneId(lane) for lane in range(len(prompts))]
    tokens = np.array(
        [prefill(engine, p, lane) for p, lane in zip(prompts, lanes, strict=True)], dtype=np.int64
    )
    positions = np.array([len(prompt) for prompt in prompts], dtype=np.int64)

    def run() -> None:
        nonlocal tokens, positions
        for _ in range(steps):
            tokens = engine.decode(lanes, tokens, positions).array.argmax(axis=-1)
            positions = positions + 1

    return timed(run)


def _prefill(subject: Subject, kind: PeerKind, *, tokens: int, rounds: int) -> Iterator[Reading]:
    name = f"engine.prefill{tokens}.vs_{kind}"
    with open_peer(kind, subject.peers) as peer, subject.engine(lanes=1, max_seq_len=2176) as engine:
        variant = quicker_variant(peer, "prefill", lambda: subject.prompt(tokens))
        paired = alternate(
            lambda: tokens / prefill_seconds(engine, subject.prompt(tokens)),
            lambda: tokens / peer.seconds("prefill", subject.prompt(tokens), variant=variant),
            rounds=rounds,
        )
    yield _speed(name, paired, f"{kind} {variant}")


def _decode_llamacpp(subject: Subject) -> Iterator[Reading]:
    with open_peer("llamacpp", subject.peers) as peer, subject.engine(lanes=8, max_seq_len=512) as engine:
        theirs, variant = _peer_decode(subject, peer)
        one = alternate(lambda: _decode_rate(subject, engine, 1), theirs, rounds=7)
        yield _speed("engine.decode1.vs_llamacpp", one, f"llamacpp {variant}")
        eight = alternate(lambda: _decode_rate(subject, engine, 8), theirs, rounds=5)
        yield _speed("engine.decode8.vs_llamacpp1", eight, f"llamacpp {variant}, one sequence")


def _decode_openvino(subject: Subject) -> Iterator[Reading]:
    with open_peer("openvino", subject.peers) as peer, subject.engine(lanes=8, max_seq_len=512) as engine:
        theirs, variant = _peer_decode(subject, peer)
        paired = alternate(lambda: _decode_rate(subject, engine, 1), theirs, rounds=7)
    yield _speed("engine.decode1.vs_openvino", paired, f"openvino {variant}")


def _peer_decode(subject: Subject, peer: Peer) -> tuple[Callable[[], float], str]:
    """A side that gives the peer's tokens per second for one sequence, and the variant it runs."""
    variant = quicker_variant(peer, "decode", lambda: subject.prompt(_CONTEXT), count=_STEPS)

    def rate() -> float:
        seconds = peer.seconds("decode", subject.prompt(_CONTEXT), variant=variant, count=_STEPS)
        return _STEPS / seconds

    return rate, variant


def _decode_rate(subject: Subject, engine: Engine, sequences: int) -> float:
    prompts = [subject.prompt(_CONTEXT) for _ in range(sequences)]
    return sequences * _STEPS / decode_seconds(engine, prompts)


def _speed(name: str, paired: Paired, peer: str) -> Reading:
    ours, theirs = paired.medians
    return Reading(name, paired.ratio, f"{ours:.0f} tok/s, {peer} {theirs:.0f} tok/s, {len(paired.a)} pairs")


def _perplexity(subject: Subject) -> Iterator[Reading]:
    tokens = subject.corpus[:_PERPLEXITY_TOKENS]
    of = {}
    for precision in ("int8", "fp32"):
        with subject.engine(
            lanes=_WINDOWS, max_seq_len=_PERPLEXITY_TOKENS + 32, precision=precision
        ) as engine:
            of[precision] = losses(engine, tokens)
    extra = of["int8"] - of["fp32"]
    ratio, error = np.exp(extra.mean()), extra.std() / np.sqrt(len(extra))
    int8, fp32 = (float(np.exp(loss.mean())) for loss in (of["int8"], of["fp32"]))
    detail = f"{int8:.3f} against {fp32:.3f} (± {error:.4f}) on the first {len(tokens)} tokens of {TEXT}"
    yield Reading("engine.perplexity_vs_fp32", float(ratio), detail)


def losses(engine: Engine, tokens: Tokens) -> npt.NDArray[np.float64]:
    """Negative log-likelihood of tokens 1 … N−1, each given all tokens before it; N fills the lanes evenly.

    The prompt is prefilled once; every lane then takes the blocks before its part and decodes that part along
    the given tokens, so that all parts advance together. An exact engine gives the logits of one long run.
    """
    lanes = [LaneId(lane) for lane in range(engine.spec.lanes)]
    part = len(tokens) // len(lanes)
    prefill(engine, tokens, lanes[0])
    for number, lane in enumerate(lanes[1:], start=1):
        _copy_blocks(engine, lane, number * part // engine.spec.block_tokens)
    starts = np.arange(len(lanes), dtype=np.int64) * part
    found = np.zeros((len(lanes), part))
    for step in range(part):
        at = starts + step
        logits = engine.decode(lanes, tokens[at], at).array
        found[:, step] = _losses(logits, tokens[np.minimum(at + 1, len(tokens) - 1)])
    return found.reshape(-1)[:-1]  # nothing is known to follow the last token


def _copy_blocks(engine: Engine, lane: LaneId, count: int) -> None:
    """Give `lane` the first blocks of lane 0, one at a time."""
    buffer = np.empty(engine.spec.block_nbytes, dtype=np.uint8)
    for block in range(count):
        engine.export_blocks(LaneId(0), range(block, block + 1), [buffer])
        engine.import_blocks(lane, range(block, block + 1), [buffer])


def _losses(logits: npt.NDArray[np.float32], targets: Tokens) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    top = wide.max(axis=1)
    normaliser = top + np.log(np.exp(wide - top[:, None]).sum(axis=1))
    return np.asarray(normaliser - wide[np.arange(len(targets)), targets])


def _room_of_a_lane(subject: Subject) -> Iterator[Reading]:
    """The same decode at 256 tokens of context, in lanes with much room and with little."""
    prompt = subject.prompt(256)
    with (
        subject.engine(lanes=1, max_seq_len=8192 - 32) as wide,
        subject.engine(lanes=1, max_seq_len=2048 - 32) as narrow,
    ):
        paired = alternate(
            lambda: decode_seconds(wide, [prompt], steps=48),
            lambda: decode_seconds(narrow, [prompt], steps=48),
            rounds=7,
        )
    large, small = (1e3 * seconds / 48 for seconds in paired.medians)
    detail = f"{large:.2f} ms a step against {small:.2f} ms, one sequence, {len(paired.a)} pairs"
    yield Reading("engine.decode1.s8192_vs_s2048", paired.ratio, detail)
