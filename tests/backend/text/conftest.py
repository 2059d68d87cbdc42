import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from backend.text import TextModel
from tests.backend.text import tokenizers_made as made


@pytest.fixture(scope="session")
def real_files(demo_release: Path) -> dict[str, bytes]:
    return {"tokenizer.json": (demo_release / "tokenizer.json").read_bytes()}


@pytest.fixture(scope="session")
def real_text(demo_release: Path, real_files: dict[str, bytes]) -> TextModel:
    """SmolLM2's text side, as the backend opens it."""
    manifest = json.loads((demo_release / "engine.json").read_bytes())
    return TextModel.from_release(
        real_files,
        chat_template=manifest["chat_template"],
        eos_token_ids=manifest["eos_token_ids"],
        bos_token_id=manifest["bos_token_id"],
        add_bos=manifest["add_bos"],
    )


@pytest.fixture(scope="session")
def real_tokenizer(real_files: dict[str, bytes]) -> Tokenizer:
    return Tokenizer.from_str(real_files["tokenizer.json"].decode())


KINDS = {
    "byte level": made.byte_level,
    "byte fallback, strip": lambda: made.byte_fallback(strip=True),
    "byte fallback": lambda: made.byte_fallback(strip=False),
    "metaspace always": lambda: made.metaspace("always"),
    "metaspace never": lambda: made.metaspace("never"),
}


@pytest.fixture(scope="session", params=list(KINDS))
def small(request: pytest.FixtureRequest) -> tuple[Tokenizer, TextModel]:
    """A tokenizer of each kind and the text model built from it."""
    tokenizer = KINDS[request.param]()
    return tokenizer, made.text_model(tokenizer)
