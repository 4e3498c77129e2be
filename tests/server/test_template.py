from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from model.tokenizer import Tokenizer
from server import sandbox
from server.errors import TemplateError, Unsupported
from server.template import Chat, ChatTemplate

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
TOOLS = """
{%- macro call(c) %}<tool_call>{{ {'name': c.name, 'arguments': c.arguments} | tojson }}</tool_call>{% endmacro %}
{%- if tools %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}
        {{- '\\n' ~ loop.index ~ '/' ~ loop.length ~ ' ' }}{{ tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}{%- set ns.last = messages|length - 1 - loop.index0 %}{%- break %}{% endif %}
{%- endfor %}
{%- for message in messages if message.role != 'developer' %}
    {{- '<|' ~ message.role ~ '|>' }}
    {%- if loop.index0 == ns.last %}{{ '[last]' }}{% endif %}
    {%- generation %}{{ message.content.split('</think>')[-1].lstrip('\\n') }}{% endgeneration %}
    {%- for c in message.tool_calls or [] %}{{ call(c.function) }}{% endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}
"""
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": 'Be <brief> & "plain".'},
    {"role": "user", "content": "  Hi, 家!\n"},
    {"role": "assistant", "content": "<think>\nhm</think>\n\nHello"},
    {"role": "user", "content": "Again?"},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"<a>": {}}}}}


def said(source: str, *messages: dict[str, Any], **fields: Any) -> str:
    return ChatTemplate(source).render(Chat(messages or [{"role": "user", "content": "x"}], **fields))


def rendered(messages: list[dict[str, Any]], source: str, **options: Any) -> str:
    """What transformers makes of it."""
    texts: Any = render_jinja_template([messages], chat_template=source, bos_token="<s>", **options)[0]
    return str(texts[0])


def refusal(source: str, *messages: dict[str, Any], **fields: Any) -> str:
    with pytest.raises(TemplateError) as caught:
        said(source, *messages, **fields)
    assert caught.value.body()["error"]["code"] == "template_error"
    return caught.value.message


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", ["demo", "llama3", "tools"])
def test_the_text_is_the_one_transformers_renders(smol: Tokenizer, name: str, prompt: bool) -> None:
    source = {"demo": smol.chat_template or "", "llama3": LLAMA3, "tools": TOOLS}[name]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"<x>": ["é", 1.5, True]}}}
    messages = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call, call]}]
    given = [*MESSAGES, json.loads(json.dumps(messages[-1]))]
    for one in given[-1]["tool_calls"]:
        one["function"]["arguments"] = json.dumps(one["function"]["arguments"])
    expected = rendered(messages, source, tools=[TOOL], add_generation_prompt=prompt, enable_thinking=False)
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert (
        template.render(Chat(given, tools=[TOOL], add_generation_prompt=prompt, kwargs={"enable_thinking": False}))
        == expected
    )


@pytest.mark.parametrize("content", ["The answer", "The answer ", "  The answer\n"])
@pytest.mark.parametrize("name", ["demo", "llama3"])
def test_the_last_message_can_be_continued(smol: Tokenizer, name: str, content: str) -> None:
    source = {"demo": smol.chat_template or "", "llama3": LLAMA3}[name]
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    expected = rendered(messages, source, continue_final_message=True)
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render(Chat(messages, add_generation_prompt=False, continue_final_message=True)) == expected


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    assert "leaves out" in refusal("{{ messages[0].role }}", continue_final_message=True)


def test_null_is_absent_and_never_none() -> None:
    source = (
        "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.tool_calls is defined }}|{{ m.name }}]{% endfor %}"
    )
    message = {"role": "assistant", "content": None, "tool_calls": None, "name": None}
    assert said(source, message) == said(source, {"role": "assistant"}) == "[assistant||False|]"


def test_parts_are_joined_without_a_separator() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b\n"}, {"type": "refusal", "refusal": "c"}]
    assert said("{{ messages[0].content }}", {"role": "user", "content": parts}) == "ab\nc"
    with pytest.raises(Unsupported, match="content other than text"):
        said("{{ messages }}", {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]})


@pytest.mark.parametrize(
    ("source", "role"), [("{{ messages[0].role }}", "system"), ("{{ messages[0].role }}{# developer #}", "developer")]
)
def test_developer_is_system_for_templates_that_do_not_know_it(source: str, role: str) -> None:
    assert said(source, {"role": "developer", "content": "x"}) == role


def call(arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def test_arguments_are_an_object_where_they_are_json_of_one() -> None:
    source = "{% set a = messages[0].tool_calls[0].function.arguments %}{{ a is mapping }} {{ a }}"
    assert said(source, call('{"a": 1}')) == "True {'a': 1}"
    for text in ("", "{}"):
        assert said(source, call(text)) == "True {}"
    for text in ("{bad", "[1]", "7", "[" * 100_000):
        assert said(source, call(text)) == f"False {text}"


def test_a_template_that_puts_arguments_into_text_gets_the_string() -> None:
    assert said("{{ '<' + messages[0].tool_calls[0].function.arguments + '>' }}", call('{"a":  1}')) == '<{"a":  1}>'


GEMMA = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def test_a_refused_system_message_is_put_into_the_first_user_message() -> None:
    system, user = {"role": "system", "content": "S"}, {"role": "user", "content": "U"}
    assert said(GEMMA, system, user, {"role": "assistant", "content": "A"}) == "<user>S\n\nU<assistant>A"
    assert refusal(GEMMA, system) == "System role not supported"
    with pytest.raises(TemplateError, match="System role not supported"):
        ChatTemplate(GEMMA, fold_system=False).render(Chat([system, user]))
    never = "{{ raise_exception('no system, no users') }}"
    assert refusal(never, system, user) == "no system, no users"


def test_only_what_the_template_reads_and_nothing_reserved_can_be_set() -> None:
    source = "{{ a }}{{ b }}{{ add_generation_prompt }}{{ bos_token }}{{ messages | length }}"
    template = ChatTemplate(source, {"bos_token": "<s>"})
    kwargs = {"a": [1], "c": 1, "add_generation_prompt": "no", "bos_token": "no", "messages": []}
    assert template.render(Chat([{"role": "user", "content": "x"}], kwargs=kwargs)) == "[1]True<s>1"


def test_a_refusal_has_the_template_s_words() -> None:
    assert refusal("{{ raise_exception('not like this') }}") == "not like this"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for %}", "line 1"),
        ("{% if x %}", "endif"),
        ("{{ x | nofilter }}", "nofilter"),
        ("{{ 1 + messages }}", "unsupported operand"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{% include 'x' %}", "chat template failed"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ messages[0].update(a=1) }}", "not safely callable|unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", "unsafe"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "nested too deeply"),
        ("{{ " + "[" * 250 + "x" + "]" * 250 + " }}", "nested too deeply"),
    ],
)
def test_any_failure_is_an_error_of_one_kind(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words) as caught:
        said(source)
    assert " at 0x" not in caught.value.message


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(n=3) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set ns.s = ''.join([ns.s, ns.s]) %}{% endfor %}",
        "{% set s = 'x' * 9999999 %}{{ s.replace('x', s) }}",
        "{% set s = 'x' * 9999999 %}{{ s | replace('', s) }}",
        "{% set s = 'x\n' * 9999999 %}{{ s | indent('y' * 999) }}",
        "{% set s %}{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}{% endset %}",
        "{% set s %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endset %}",
        "{{ 'x' * 10**10 }}",
        "{{ 10**10 * 'x' }}",
        "{{ 9**9**9 }}",
        "{{ 'x'.ljust(10**10) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10000000000, 1) }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, '10000000000') }}",
        "{{ 'x' | center(10**10) }}",
        "{{ '\t'.expandtabs(10**10) }}",
        "{{ 'x'.translate({120: 'y'}) }}",
    ],
)
def test_no_template_runs_long_or_grows_large(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.3)
    before = time.thread_time()
    assert refusal(source)
    assert time.thread_time() - before < 1.5


def test_a_long_conversation_is_not_too_much() -> None:
    messages = [{"role": "user", "content": "word " * 20}] * 4000
    text = ChatTemplate(LLAMA3, {"bos_token": "<s>"}).render(Chat(messages))
    assert text.count("<|eot_id|>") == 4000


def test_strftime_now_asks_the_clock_it_was_given() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26))
    assert template.render(Chat([{"role": "user", "content": "x"}])) == "26 Jul 2024"


def test_a_huge_template_is_refused() -> None:
    with pytest.raises(TemplateError, match="more than"):
        ChatTemplate("x" * 1_000_001)
