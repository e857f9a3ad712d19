"""A chat template that takes too much memory or time is stopped with an error."""

import time

import pytest

from fdjax.text import template_limits
from fdjax.text.chat_template import ChatTemplate

HI = [{"role": "user", "content": "Hi"}]


def render(source: str, **variables) -> str:
    return ChatTemplate({"default": source}).render(HI, **variables)


def repeated(expression: str) -> str:
    """A value that is doubled 60 times and then shown."""
    return (
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
        f"{{% set n.x = {expression} %}}{{% endfor %}}{{{{ n.x }}}}"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ [0] * 10**10 }}",
        "{{ 'a' | center(10**10) }}",
        "{{ 'a'.center(10**10) }}",
        "{{ 'a'.zfill(10**10) }}",
        "{{ 'a'.rjust(width) }}",
        r"{{ 'a\tb'.expandtabs(10**10) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10**10, 1) }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**10) }}",
        "{{ ('%(a)s' * 10**6) % {'a': 'b' * 10**7} }}",
        "{{ ('{0}' * 10**6).format('b' * 10**7) }}",
        "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
        "{{ ('a' * 10**6).replace('', 'b' * 10**6) }}",
        "{{ ('ab' * 10**6).translate({97: 'b' * 10**6}) }}",
        "{{ 'a' | indent(10**10) }}",
        r"{{ ('\n' * 10**6) | indent('b' * 10**6) }}",
        r"{{ ('\n' * 10**6) | indent(10**6, true, true) }}",
        "{{ messages | tojson(separators=('a' * 10**7, 'b' * 10**7)) }}",
        "{{ ([[[[1]]]] * 9000) | tojson(indent=99999) }}",
        "{{ range(9999) | join('a' * 10**7) }}",
        "{{ ('a' * 10**7).join(range(99) | map('string')) }}",
        "{{ {}.fromkeys(range(99999), 'a' * 10**7) }}",
        "{% filter center(10**10) %}a{% endfilter %}",
        "{% for i in range(99999) %}{{ 'a' * 10**6 }}{% endfor %}",
        "{% macro f(x) %}{{ f(x + x) }}{% endmacro %}{{ f('a') }}",
        repeated("n.x + n.x"),
        repeated("n.x ~ n.x"),
        repeated("[n.x, n.x] | join"),
        repeated("n.x.join([n.x, n.x])"),
        "{% set n = namespace(x='a') %}{% for i in range(60) %}"
        "{% set x %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = x %}{% endfor %}",
    ],
)
def test_a_text_that_is_too_long_is_not_made(source):
    with pytest.raises(
        ValueError, match=r"^chat: the template was stopped: it makes a text"
    ) as error:
        render(source, width=10**10)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "expression",
    ["[n.x, n.x]", "(n.x, n.x)", "{'a': n.x, 'b': n.x}", "dict(a=n.x, b=n.x).items()"]
    + ["namespace(a=n.x, b=n.x)", "cycler(n.x, n.x).items"],
)
def test_a_value_counts_as_often_as_it_appears(expression, monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_SIZE", 2**18)
    with pytest.raises(
        ValueError, match=r"^chat: the template was stopped: it makes a text or list"
    ):
        render(repeated(expression))


@pytest.mark.parametrize("double", ["[{0}, {0}]", "({0}, {0})", "{{'a': {0}, 'b': {0}}}"])
def test_a_value_counts_before_it_is_used(double, monkeypatch):
    """A comparison reads the whole list but makes no new value."""
    monkeypatch.setattr(template_limits, "MAX_SIZE", 2**16)
    source = (
        "{% set n = namespace(x='ab', y='ab') %}{% for i in range(COUNT) %}"
        f"{{% set n.x = {double.format('n.x')} %}}{{% set n.y = {double.format('n.y')} %}}"
        "{% endfor %}{{ n.x == n.y }}"
    )
    assert render(source.replace("COUNT", "8")) == "True"
    with pytest.raises(
        ValueError, match=r"^chat: the template was stopped: it makes a text or list"
    ):
        render(source.replace("COUNT", "18"))


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{{ 9 ** 999999 }}", "a number of more than 65,536 bits"),
        (repeated("(n.x | length + 9**99) * 2**65000"), "a number of more than 65,536 bits"),
        ("{{ [1] | batch(10**10, 'a') | list }}", "asks for more than 100,000"),
        ("{{ [1] | slice(10**10) | list }}", "asks for more than 100,000"),
        ("{{ messages | tojson(indent=10**9) }}", "asks for more than 100,000"),
        ("{{ (1).to_bytes(10**10, 'big') }}", "asks for more than 100,000"),
        ("{{ 1 | round(10**9, 'ceil') }}", "asks for more than 300"),
        ("{{ ('f' * 10**6) | int(0, 16) % 7 }}", "filter 'int' gets more than 65,536"),
        ("{{ ('<' * 10**6) | striptags }}", "filter 'striptags' gets more than 65,536"),
        ("{{ 'a'.strip('b' * 10**6) }}", "strips more than 65,536"),
        ("{{ range(99999) | map('center', 99999) | list }}", "too many long texts"),
        (
            "{% set x %}{% for i in range(9999) %}{{ 'a' * 10**6 }}{% endfor %}{% endset %}",
            "makes (a text|too many)",
        ),
    ],
)
def test_other_ways_to_take_too_much(source, what):
    with pytest.raises(ValueError, match=rf"^chat: the template was stopped: .*{what}"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set a = range(50) | list %}{% for i in a %}{% for j in a %}{% endfor %}{% endfor %}",
        "{% for i in range(999) %}{{ messages | length is odd }}{% endfor %}",
    ],
)
def test_steps_are_counted(source, monkeypatch):
    monkeypatch.setattr(template_limits, "_MAX_STEPS", 1000)
    with pytest.raises(
        ValueError, match=r"^chat: the template was stopped: it takes more than 1,\d+ st"
    ):
        render(source)


def test_time_is_limited(monkeypatch):
    monkeypatch.setattr(template_limits, "_MAX_SECONDS", 0.3)
    begin = time.monotonic()
    with pytest.raises(ValueError, match="the template was stopped: it takes longer than 0 s"):
        render(
            "{% for i in range(9999) %}{% for j in range(9999) if j < 0 %}{% endfor %}{% endfor %}"
        )
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    "source",
    ["{% for a in [1] %}" * 40 + "{% endfor %}" * 40, "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"]
    + ["{{ lipsum(n=10**6) }}"],
)
def test_what_python_or_the_sandbox_refuses_is_an_error_of_one_line(source):
    with pytest.raises(ValueError, match=r"^chat: the template (fails|refuses)") as caught:
        render(source)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_large_input_is_no_reason_to_stop():
    text = "long text, " * 10**6
    source = (
        "{% set n = namespace(all=[], text='') %}{% for m in messages %}"
        "{% set n.all = n.all + [m] %}{% set n.text = n.text ~ m.role %}{% endfor %}"
        "{% for m in n.all %}{{ '<' + m.role + '>' ~ m.content | trim }}{% endfor %}"
        "{{ n.text | length }}"
    )
    messages = [{"role": "user", "content": text.strip(" ")}, *HI * 1000]
    made = ChatTemplate({"default": source}).render(messages)
    assert made == "<user>" + text.strip(" ") + "<user>Hi" * 1000 + "4004"
