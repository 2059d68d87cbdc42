"""`messages`: InvalidRequest naming where, or a list that every template can rely on, rendered in bounds."""

import json

from backend.errors import InvalidRequest
from backend.text.chat import MAX_MESSAGES, ChatTemplate, read_messages
from tests.fuzz.contract import plain

_MOST = 5000
_TEMPLATES = tuple(
    ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    for source in (
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m.content | trim }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no ' ~ m.content) }}"
        "{% endif %}{{ m.content.split('</think>')[-1].format(m) }}{{ m | tojson(indent=2) }}"
        "{{ m.name.upper() }}{% endfor %}",
        "{% for m in messages %}{% for n in messages %}{{ m.content ~ n.content * 3 }}"
        "{% endfor %}{% endfor %}",
    )
)


def _messages(*messages: object) -> bytes:
    return json.dumps(messages).encode()


EXAMPLES = (
    _messages({"role": "user", "content": "hello"}),
    _messages(
        {"role": "system", "content": "be\nbrief\u202e"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "\u0000"}]},
        {"role": "assistant", "content": "{{ messages.__class__ }}{% for x in y %}", "name": "bob"},
    ),
    _messages({"role": "user", "content": "{0.__class__.__mro__}{m.__init__.__globals__}"}),
    _messages({"role": "user", "content": "x" * 3000}) * 1,
    _messages({"role": "user", "content": "x" * 6000}),
    b'[{"role": "user", "content": "\\ud800"}]',
    b"[" * 20_000,
    b'[{"role": "user", "content": ' * 3000,
    b'[{"role": ' + b"9" * 10_000 + b"}]",
    b'[{"role":"user","content":"","content":""}]',
    b"[NaN]",
    b"[" + b"1," * 20_000 + b"1]",
)


def target(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    try:
        messages = read_messages(text)
    except InvalidRequest as error:
        plain(error)
        return
    assert 1 <= len(messages) <= MAX_MESSAGES
    for message in messages:
        assert message.keys() <= {"role", "content", "name"}
        assert all(isinstance(value, str) and value.encode() is not None for value in message.values())
        assert message["role"].isascii()
    for template in _TEMPLATES:
        try:
            rendered = template.render(messages, max_bytes=_MOST)
        except InvalidRequest as error:
            plain(error)
        else:
            assert len(rendered.encode()) <= _MOST
            assert "<class" not in rendered, "a message was run as a program"
