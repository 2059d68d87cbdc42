"""The model under test and the text it reads: built, signed and loaded as a user would, once for all rows."""

import functools
import hashlib
import importlib
import itertools
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import engines
from engines import (
    Engine,
    EngineOptions,
    TrustSettings,
    VerifiedRelease,
    build_release,
    generate_signing_key,
    load_release_dir,
    open_engine,
    sign_release,
)
from engines.build import BuildOptions
from engines.gguf import demo_gguf, load_gguf
from engines.graph_onnxruntime import Precision
from engines.manifest import SIGNATURE
from scripts.bench.peers import PeerSettings

MAX_SEQ_LEN = 8192
MODEL = "smollm2"
TEXT = "the prose of pydoc_data.topics, the language reference that ships with Python"


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Where the bench works and with what."""

    folder: Path
    peers_python: Path
    threads: int = 2


class Subject:
    """Lazily made things that several measurements use. One thread."""

    def __init__(self, settings: BenchSettings) -> None:
        self.settings = settings
        self.ttft_s: dict[str, float] = {}
        """To a first token after 1,024, by where the prompt came from; as far as it was measured."""
        self._offset = itertools.count()

    @property
    def peers(self) -> PeerSettings:
        """The peers run the same GGUF file with the same number of threads."""
        s = self.settings
        return PeerSettings(python=s.peers_python, gguf=demo_gguf(), threads=s.threads, logs=s.folder)

    @functools.cached_property
    def keys(self) -> tuple[Path, Path]:
        """A private and a public key made for this folder."""
        folder = self.settings.folder / "keys"
        pair = folder / "release.key", folder / "release.pub"
        return pair if all(path.exists() for path in pair) else generate_signing_key(folder)

    def release_folder(self, precision: Precision = "int8") -> Path:
        """The signed release of the demo weights; built at the first call."""
        return _built(self, precision)

    def release(self, precision: Precision = "int8") -> VerifiedRelease:
        """The release through the whole load chain."""
        trust = TrustSettings(keys=(self.keys[1],))
        return load_release_dir(self.release_folder(precision), model=MODEL, trust=trust)

    @contextmanager
    def engine(self, *, lanes: int, max_seq_len: int, precision: Precision = "int8") -> Iterator[Engine]:
        """An open engine with the bench's threads, closed at the end."""
        options = EngineOptions(threads=self.settings.threads, lanes=lanes, max_seq_len=max_seq_len)
        engine = open_engine(self.release(precision), options)
        try:
            yield engine
        finally:
            engine.close()

    @functools.cached_property
    def corpus(self) -> npt.NDArray[np.int64]:
        """Token ids of a long English text."""
        tokenizers = importlib.import_module("tokenizers")
        tokenizer = tokenizers.Tokenizer.from_file(str(self.release_folder() / "tokenizer.json"))
        return np.array(tokenizer.encode(english_text(), add_special_tokens=False).ids, dtype=np.int64)

    def prompt(self, tokens: int) -> npt.NDArray[np.int64]:
        """`tokens` ids of the text from another place at every call, so that no cache has seen them."""
        start = next(self._offset) * 211 % (len(self.corpus) - tokens)
        return self.corpus[start : start + tokens]


def english_text() -> str:
    """The prose of Python's own reference: whole paragraphs, without grammar, code, tables and headings."""
    topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
    blocks = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    return "\n".join(text for text in (" ".join(block.split()) for block in blocks) if _is_prose(text))


def _built(subject: Subject, precision: Precision) -> Path:
    """Build and sign, unless this very code has done so before."""
    folder = subject.settings.folder / "releases" / f"{precision}-{_code_digest()}"
    found = [path.parent for path in folder.glob(f"*/{SIGNATURE}")]
    if found:
        return found[0]
    for outdated in folder.parent.glob(f"{precision}-*"):
        shutil.rmtree(outdated)
    options = BuildOptions(precision=precision, lanes=8, max_seq_len=MAX_SEQ_LEN)
    release = build_release(load_gguf(demo_gguf()), folder, model=MODEL, release=1, options=options)
    sign_release(release, subject.keys[0])
    return release


def _is_prose(text: str) -> bool:
    code = "::=" in text or ">>>" in text
    return len(text) > 200 and text[0].isupper() and text.endswith(".") and not code


def _code_digest() -> str:
    """Changes with the code that releases are built by."""
    digest = hashlib.sha256()
    for source in sorted(Path(engines.__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
