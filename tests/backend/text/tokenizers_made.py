"""Small tokenizers of every supported kind, made on the spot, and a rich set of texts."""

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from backend.text import TextModel

TEXTS = [
    "plain words", " leading space", "two  spaces", "tab\tand\nlines\r\n", "", " ", "0123",
    "naïve café", "e\u0301a\u0308\u0323o", "Zalgo\u0300\u0301\u0302\u0303", "\u0301 alone",
    "日本語テキスト", "한국어", "한", "नमस्ते", "กำลัง", "ไทย",
    "👍🏽", "👩‍👩‍👧‍👦 family", "🏳️‍🌈", "🇩🇪🇫🇷🇯🇵", "🇩", "❤️", "1️⃣", "😀😀", "a\u200db", "\ufffd", "𝔘𝔫𝔦",
    "<|end|>", "<|en", "STOP", "STO", "the end. The END", "\u0600a", "\u2581mark", "<0xE2>",
]  # fmt: skip


def text_model(tokenizer: Tokenizer) -> TextModel:
    data = tokenizer.to_str().encode()
    return TextModel.from_release(
        {"tokenizer.json": data}, chat_template=None, eos_token_ids=(), bos_token_id=None, add_bos=False
    )


def byte_level() -> Tokenizer:
    """All 256 bytes and merges that cut characters anywhere; special and plain added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)}
    merges = []
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in TEXTS:
        shown = "".join(piece for piece, _ in pieces.pre_tokenize_str(text)) if text else ""
        for i in range(0, len(shown) - 1, 3):
            pair = shown[i : i + 2]
            if pair not in vocabulary:
                vocabulary[pair] = len(vocabulary)
                merges.append((pair[0], pair[1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|eos|>"])
    tokenizer.add_tokens([AddedToken("plain added token"), AddedToken("é–added")])
    return tokenizer


def _with_bytes(words: list[str]) -> dict[str, int]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [word for word in dict.fromkeys(words) if word not in tokens]
    return {token: index for index, token in enumerate(tokens)}


WORDS = [
    "▁", "▁the", "▁▁", "a", "b", "end", ".", "▁S", "TOP", "é", "日", "👍", "🏽", "\u0301", "\u200d", "👩",
    "🇩", "🇪", "🇫", "<", "|", ">", "\n", "x▁y", "ST", "OP", "\ufffd",
]  # fmt: skip


def byte_fallback(*, strip: bool) -> Tokenizer:
    """As Llama 2 (with strip) and Gemma (without)."""
    tokenizer = Tokenizer(
        models.BPE(vocab=_with_bytes(WORDS), merges=[], byte_fallback=True, unk_token="<unk>")
    )
    steps: list[object] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    """As T5 and XLM-R."""
    vocabulary = {word: index for index, word in enumerate(["<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=scheme)
    tokenizer.add_special_tokens(["<pad>"])
    return tokenizer


def with_decoder(decoder: object) -> bytes:
    """A tokenizer.json whose decoder is replaced by this JSON."""
    content = json.loads(byte_level().to_str())
    content["decoder"] = decoder
    return json.dumps(content).encode()
