"""Text in and out of a decoder: tokenizer, chat template, incremental detokeniser, stop words. The face."""

from backend.text.chat import ChatTemplate, Message, read_messages
from backend.text.stops import StopWords
from backend.text.stream import StreamDecoder
from backend.text.tokenizer import TextModel

__all__ = ["ChatTemplate", "Message", "StopWords", "StreamDecoder", "TextModel", "read_messages"]
