import json
from datetime import datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from backend.errors import ConfigError, InvalidRequest
from backend.text import ChatTemplate, TextModel, read_messages
from backend.text.chat import MAX_MESSAGES

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"

ALTERNATING = """{%- if messages[0]['role'] == 'system' %}
    {%- set rest = messages[1:] %}{% set system = messages[0]['content'] %}
{%- else %}{% set rest = messages %}{% set system = none %}{% endif %}
{{- bos_token }}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.first and system else '') }}
        {{- message['content'].strip() + ' [/INST]' }}
    {%- else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}
{%- endfor %}"""

LOOPS = """{% for message in messages %}
{% if message.role == 'tool' %}{% continue %}{% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
{{ message | tojson }}{% generation %}{{ message.content | tojson(indent=2) }}{% endgeneration %}
{% endfor %}
{% if tools is not none %}tools{% endif %}
{%- if add_generation_prompt %}go{% endif %}"""

CHATS = [
    [{"role": "user", "content": "What is <b>2 + 2</b>? 'quotes' & \"more\""}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " é 日本 👍 "}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": ""},
    ],
]

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def render(template: str, messages: list[dict[str, str]], **options: object) -> str:
    return ChatTemplate(template, special_tokens=SPECIAL).render(messages, max_bytes=10_000, **options)


@pytest.mark.parametrize("template", [CHATML, ALTERNATING, LOOPS])
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_what_hugging_face_renders(
    template: str, messages: list[dict[str, str]], prompt: bool
) -> None:
    theirs, _ = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=prompt, **SPECIAL
    )
    assert render(template, messages, add_generation_prompt=prompt) == theirs[0]


def test_renders_the_real_template(real_text: TextModel) -> None:
    assert real_text.has_chat_template
    shown = real_text.render_chat([{"role": "user", "content": "Hi"}], max_bytes=1000)
    assert shown == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_strftime_now_asks_the_clock_it_was_given() -> None:
    template = ChatTemplate(
        "{{ strftime_now('%d %B %Y') }}", special_tokens={}, now=lambda: datetime(2024, 7, 26, 12)
    )
    assert template.render([], max_bytes=100) == "26 July 2024"


def test_a_template_may_refuse_the_messages() -> None:
    with pytest.raises(
        InvalidRequest, match=r"^messages: refused by the chat template: roles must alternate"
    ):
        render(ALTERNATING, [{"role": "assistant", "content": "a"}])


@pytest.mark.parametrize(
    "template", ["{{ messages[7].content.x.y }}", "{{ 1 / 0 }}", "{{ messages + 3 }}", "{{ 'a'.b.c() }}"]
)
def test_a_template_that_fails_is_a_bad_request_in_one_line(template: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^messages: the chat template failed on them: [^\n]*$"):
        render(template, [{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ cycler.__init__.__globals__.os.getcwd() }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(template: str) -> None:
    with pytest.raises(InvalidRequest):
        render(template, [{"role": "user", "content": "a"}])


@pytest.mark.parametrize("template", ["{% for %}", "{{", "{% nope %}", "{{ x | nope }}"])
def test_a_broken_template_does_not_load(template: str) -> None:
    with pytest.raises(ConfigError, match=r"^chat_template: expected a Jinja template"):
        ChatTemplate(template, special_tokens={})


def test_output_is_bounded_in_bytes() -> None:
    messages = [{"role": "user", "content": "é" * 10}] * 30
    assert len(render(CHATML, messages).encode()) > 1000
    with pytest.raises(InvalidRequest, match="exceeds 1000 bytes"):
        ChatTemplate(CHATML, special_tokens={}).render(messages, max_bytes=1000)


def test_rendering_is_bounded_in_time() -> None:
    ticks = iter(range(1000))
    template = ChatTemplate(CHATML, special_tokens={}, clock=lambda: float(next(ticks)))
    with pytest.raises(InvalidRequest, match="took more than"):
        template.render([{"role": "user", "content": "a"}] * 30, max_bytes=10_000)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi"}]),
        ([{"content": "", "role": "tool", "name": "f.1"}], [{"role": "tool", "content": "", "name": "f.1"}]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            [{"role": "user", "content": "a\nb"}],
        ),
        ([{"role": "user", "content": []}], [{"role": "user", "content": ""}]),
    ],
)
def test_messages_that_are_well(value: object, expected: list[dict[str, str]]) -> None:
    assert read_messages(json.dumps(value)) == expected


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "messages: must be JSON: Expecting value at character 0"),
        ("{", "messages: must be JSON"),
        ('"hi"', "messages: must be a JSON list of messages, got 'hi'"),
        ('{"role": "user"}', "messages: must be a JSON list"),
        ("[]", f"messages: must hold 1 to {MAX_MESSAGES} messages, got 0"),
        (json.dumps([{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1)), f"got {MAX_MESSAGES + 1}"),
        ("[3]", r"messages[0]: must be a JSON object with role and content, got 3"),
        ("[null]", "messages[0]: must be a JSON object"),
        ('[{"role": "user", "content": "a"}, {"content": "b"}]', "messages[1].role: is missing"),
        ('[{"role": "user"}]', "messages[0].content: is missing"),
        ('[{"role": 3, "content": "a"}]', "messages[0].role: must be a string that matches"),
        ('[{"role": "", "content": "a"}]', "messages[0].role: must be a string that matches"),
        ('[{"role": "us er<|im_end|>", "content": "a"}]', "messages[0].role: must be a string"),
        (
            '[{"role": "user", "content": null}]',
            "messages[0].content: must be a string or a list of text parts",
        ),
        ('[{"role": "user", "content": 1.5}]', "messages[0].content: must be a string or a list"),
        ('[{"role": "user", "content": ["a"]}]', "messages[0].content[0]: must be"),
        (
            '[{"role": "user", "content": [{"type": "image_url"}]}]',
            "messages[0].content[0].type: must be \"text\", got 'image_url'",
        ),
        (
            '[{"role": "user", "content": [{"type": "text"}]}]',
            "messages[0].content[0].text: must be a string",
        ),
        (
            '[{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]',
            "content[0]: must hold type and text",
        ),
        ('[{"role": "user", "content": "a", "name": 3}]', "messages[0].name: must be a string"),
        ('[{"role": "user", "content": "a", "name": "a b"}]', "messages[0].name: must be a string"),
        ('[{"role": "user", "content": "a", "tool_calls": []}]', "messages[0].tool_calls: is not known"),
        (
            '[{"role": "user", "role": "user", "content": "a"}]',
            "messages: must not give a key twice, got 'role'",
        ),
        ('[{"role": "user", "content": "\\ud800"}]', "messages: must not hold lone surrogates"),
        ('[{"role": "user", "content": NaN}]', "messages: must hold finite numbers, got 'NaN'"),
        ('[{"role": "user", "content": "a"}] x', "messages: must be JSON: Extra data"),
        ("[" * 100_000, "messages: must be JSON within reason: nested too deep"),
        ("[" * 40 + "]" * 40, "messages: must be nested at most 32 deep"),
        ("[" + "9" * 5000 + "]", "messages: must be JSON within reason: a number is too long"),
        ('[{"role": "user", "content": "a", "x\\ny": 1}]', "'messages[0].x\\ny': is not known"),
    ],
)
def test_messages_that_are_not(text: str, error: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_messages(text)
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
