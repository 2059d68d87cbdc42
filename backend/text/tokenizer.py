"""The text side of one release: encodes prompts, renders chats, starts incremental decoders.

Threads: immutable after construction, shared by all.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from backend.errors import ConfigError
from backend.text.chat import ChatTemplate, Message
from backend.text.decoders import decode, read_token_table
from backend.text.stops import StopWords
from backend.text.stream import StreamDecoder

TOKENIZER_FILE: Final = "tokenizer.json"


class TextModel:
    """Tokenizer and chat template of a release."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        decoder: Mapping[str, Any] | None,
        *,
        template: ChatTemplate | None,
        eos_token_ids: Sequence[int],
        bos_token_id: int | None,
    ) -> None:
        """`decoder`: that of the tokenizer's JSON; `bos_token_id` goes before plain prompts, if any."""
        self._tokenizer = tokenizer
        self._table = read_token_table(tokenizer, decoder)
        self._template = template
        self._bos = bos_token_id
        self.eos_token_ids = tuple(eos_token_ids)

    @classmethod
    def from_release(
        cls,
        files: Mapping[str, bytes | memoryview],
        *,
        chat_template: str | None,
        eos_token_ids: Sequence[int],
        bos_token_id: int | None,
        add_bos: bool,
    ) -> "TextModel":
        """Build from the verified bytes of a release; ConfigError where tokenizer or template is unusable."""
        if TOKENIZER_FILE not in files:
            raise ConfigError(f"{TOKENIZER_FILE}: expected in the release, got {sorted(files)}")
        data = bytes(files[TOKENIZER_FILE])
        tokenizer = _load(data)
        if add_bos and bos_token_id is None:
            raise ConfigError("add_bos: needs bos_token_id, got None")
        names = {
            "bos_token": _token(tokenizer, bos_token_id),
            "eos_token": _token(tokenizer, eos_token_ids[0] if eos_token_ids else None),
        }
        return cls(
            tokenizer,
            json.loads(data).get("decoder"),
            template=None if chat_template is None else ChatTemplate(chat_template, special_tokens=names),
            eos_token_ids=eos_token_ids,
            bos_token_id=bos_token_id if add_bos else None,
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` works."""
        return self._template is not None

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Ids of a plain prompt, int64 [N], with the release's BOS in front unless it is there already."""
        ids = self.encode_raw(text)
        if self._bos is not None and (len(ids) == 0 or ids[0] != self._bos):
            ids = np.concatenate((np.array([self._bos], dtype=np.int64), ids))
        return ids

    def encode_raw(self, text: str) -> npt.NDArray[np.int64]:
        """Ids of `text` alone, int64 [N]; special tokens written in it are recognised, as chats need."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def render_chat(self, messages: Sequence[Message], *, max_bytes: int, answered: bool = True) -> str:
        """The prompt that the chat template makes of `messages`. Raises InvalidRequest.

        `answered`: with what asks for an answer at its end.
        """
        assert self._template is not None
        return self._template.render(messages, max_bytes=max_bytes, add_generation_prompt=answered)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of whole `ids`, special tokens skipped: what a StreamDecoder ends up with."""
        return decode(self._table, [int(token) for token in ids])

    def stream(self, stop_words: Iterable[str] = (), *, min_tokens: int = 0) -> StreamDecoder:
        """A decoder for the output of one generation."""
        return StreamDecoder(self._table.start(), StopWords(stop_words), min_tokens=min_tokens)


def _load(data: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_str(data.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception for JSON that is no tokenizer
        raise ConfigError(f"{TOKENIZER_FILE}: expected a tokenizers file, got: {error}") from None


def _token(tokenizer: Tokenizer, token_id: int | None) -> str:
    text: str | None = None if token_id is None else tokenizer.id_to_token(token_id)
    return "" if text is None else text
