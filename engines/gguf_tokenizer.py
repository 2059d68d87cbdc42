"""Rebuilds a tokenizer.json from the vocabulary, merges and pre-tokenizer name that a GGUF file carries.

Two families: byte-level BPE (`gpt2` in GGUF; the split before it is known by name) and SentencePiece BPE
with byte fallback (`llama` in GGUF; merges follow from the scores). No post-processor is written: whether a
BOS token is prepended is the manifest's `add_bos`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engines.errors import BuildError

_CONTROL, _USER_DEFINED = 3, 4

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"\p{N}" + _REST


class _Split(NamedTuple):
    """How text is cut before BPE: by a pattern, or ("" ) by GPT-2's own after `digits` are cut one by one."""

    pattern: str = ""
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False  # a word that is in the vocabulary is taken whole, whatever the merges say


_SPLITS = {
    "gpt-2": _Split(),
    "smollm": _Split(digits=True),
    "llama-bpe": _Split(_LLAMA3, whole_words=True),
    "qwen2": _Split(_QWEN2, nfc=True),
}

_ENDS = frozenset(
    (
        "<|endoftext|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|end|>",
        "</s>",
        "<|eot|>",
    )
)


def tokenizer_json(meta: Mapping[str, Any]) -> bytes:
    """The tokenizer.json of the GGUF keys `tokenizer.*`; BuildError names what is missing or unsupported."""
    family = _needed(meta, "tokenizer.ggml.model")
    tokens = _needed(meta, "tokenizer.ggml.tokens")
    match family:
        case "gpt2":
            tokenizer = _byte_level(meta, tokens)
        case "llama":
            tokenizer = _sentencepiece(meta, tokens)
        case _:
            raise BuildError(f"tokenizer.ggml.model: must be one of gpt2, llama, got {family!r}")
    _add_special(tokenizer, tokens, _types(meta, len(tokens)))
    return str(tokenizer.to_str()).encode()


def end_tokens(meta: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a generation: the declared ones, then control tokens known to end a turn or a text."""
    declared = [meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = [int(found) for found in declared if found is not None]
    tokens = _needed(meta, "tokenizer.ggml.tokens")
    types = _types(meta, len(tokens))
    ids += [
        i
        for i, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == _CONTROL and text in _ENDS
    ]
    return tuple(dict.fromkeys(ids))


def _byte_level(meta: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    name = meta.get("tokenizer.ggml.pre", "gpt-2")
    split = _SPLITS.get(name)
    if split is None:
        raise BuildError(f"tokenizer.ggml.pre: must be one of {', '.join(_SPLITS)}, got {name!r}")
    merges = [_pair(merge) for merge in _needed(meta, "tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole_words)
    except Exception as error:  # the library raises nothing narrower
        raise BuildError(f"tokenizer.ggml.merges: {error}") from error
    tokenizer = Tokenizer(model)
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    before: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.pattern:
        before.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    before.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(before)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(meta: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    scores = _needed(meta, "tokenizer.ggml.scores")
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = tokens[int(meta.get("tokenizer.ggml.unknown_token_id", 0))]
    model = models.BPE(
        vocab=vocab, merges=_merges(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    space = normalizers.Replace(" ", "▁")
    prefixed = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space] if prefixed else [space])
    after = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*after, decoders.Strip(" ", 1, 0)] if prefixed else after)
    return tokenizer


def _merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose piece scores highest: its pieces, best first, are the merges."""
    found = []
    for piece, index in vocab.items():
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(scores[index], len(left), len(right), left, right) for left, right in known]
    found.sort(key=lambda entry: entry[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in found]


def _add_special(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    listed = list(zip(tokens, types, strict=True))
    control = [AddedToken(text, special=True, normalized=False) for text, kind in listed if kind == _CONTROL]
    tokenizer.add_special_tokens(control)
    defined = [
        AddedToken(text, special=False, normalized=False) for text, kind in listed if kind == _USER_DEFINED
    ]
    tokenizer.add_tokens(defined)


def _types(meta: Mapping[str, Any], count: int) -> list[int]:
    types = meta.get("tokenizer.ggml.token_type")
    if types is None:
        return [1] * count
    if len(types) != count:
        raise BuildError(f"tokenizer.ggml.token_type: expected {count} entries, got {len(types)}")
    return [int(kind) for kind in types]


def _needed(meta: Mapping[str, Any], key: str) -> Any:
    value = meta.get(key)
    if value is None:
        raise BuildError(f"{key}: missing in the file")
    return value
