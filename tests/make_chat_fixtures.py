"""Writes tests/hf_fixtures/chat.json: what transformers renders from chat templates.

`python tests/make_chat_fixtures.py` needs transformers; reading the fixture does not. The templates
are written here, in the manner of published ones and with what those use.
"""

import json
import sys
from pathlib import Path

import jinja2
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, __version__

FIXTURE = Path(__file__).parent / "hf_fixtures" / "chat.json"

LLAMA_2 = (
    "{% if messages[0].role == 'system' %}"
    "{% set opening = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}"
    "{% set turns = messages[1:] %}"
    "{% else %}{% set opening = '' %}{% set turns = messages %}{% endif %}"
    "{% for turn in turns %}"
    "{% if (turn.role == 'user') != (loop.index0 is even) %}"
    "{{ raise_exception('user and assistant must take turns') }}{% endif %}"
    "{% if turn.role == 'user' %}"
    "{{ bos_token ~ '[INST] ' ~ (opening if loop.first else '') ~ turn.content.strip() }}"
    "{{ ' [/INST]' }}"
    "{% else %}{{ ' ' ~ turn.content | trim ~ ' ' ~ eos_token }}{% endif %}"
    "{% endfor %}"
)

LLAMA_3 = """{{- bos_token }}
{%- if date is not defined %}
    {%- set date = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today: " + date + "\\n\\n" + system + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("one tool call at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- set text = message.content is string %}
        {%- if message.content is mapping or message.content is iterable and not text %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Lines of Jinja alone leave no line behind (trim_blocks), nor what indents them (lstrip_blocks).
CHATML = """{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
<|im_start|>system
You are a helpful assistant.<|im_end|>
    {% endif %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

QWEN_3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" ~ tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and not message.content.startswith('<tool') %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and thought %}
            {{- '<|im_start|>assistant\\n<think>' + thought + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' }}
            {%- if call.arguments is string %}{{ call.arguments }}
            {%- else %}{{ call.arguments | tojson }}{% endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or loop.previtem.role != "tool" %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] not in ("user", "assistant") %}
        {{- raise_exception("only user and assistant, got " + message["role"]) }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and message == user_messages[-1] %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {{- '{"type": "function", ' }}
                {%- for key, value in tool.function.items() if key != "return" %}
                    {{- '"' + key + '": ' }}
                    {%- if value is string %}{{- '"' + value + '"' }}
                    {%- else %}{{- value | tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}" + ("" if loop.last else ", ") }}
            {%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)

PHI_3 = """{% for message in messages %}
{% if message['content'] %}
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}
"""

ZEPHYR = (
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
    "{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n"
    "{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n"
    "{% generation %}{{ '<|assistant|>\n' + message['content'] + eos_token }}{% endgeneration %}\n"
    "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}"
    "\n{% endfor %}"
)

# Everything else that published templates were seen to use.
MISCELLANY = """{%- macro show(value, depth=0) -%}
    {%- if value is mapping -%}
        {%- for key, inner in value | dictsort -%}
            {{ "  " * depth }}{{ key }}: {{ show(inner, depth + 1) }};
        {%- endfor -%}
    {%- else -%}{{ value | string | upper }}{%- endif -%}
{%- endmacro -%}
{% for message in messages %}
    {%- if message.role == 'note' %}{% continue %}{% endif %}
    {%- if message.role == 'end' %}{% break %}{% endif %}
    {%- set content = message.content %}
    {%- if content is not string %}
        {%- set texts = content | selectattr('type', 'eq', 'text') | map(attribute='text') %}
        {%- set content = texts | join('') %}
    {%- endif %}
    {%- generation -%}
        {%- set content = content | replace('&', ' and ') %}
        [{{ loop.index }}/{{ messages | length }}] {{ content }}
    {%- endgeneration %}
    {{- content | length }}{{ unk_token }}{{ missing }}{{ missing is defined }}
{% endfor %}
{%- for document in documents or [] %}{{ show(document) }}{% endfor %}
{{- {"b": "<&'\\">", "a": [1, 2.5, none, true, "é"]} | tojson }}
{{- [3, 1] | tojson(separators=(",", ":")) }}{{ {"b": 1, "a": 2} | tojson(sort_keys=true) }}
{{- "%s|%.2f" | format("x", 1.5) }}{{ dict(a=1).items() | list }}{{ "a-b".split("-")[-1] }}
"""

USER = {"role": "user", "content": "  What is <b>2 & 2</b>?\n"}
SYSTEM = {"role": "system", "content": "Be brief.  "}
ANSWER = {"role": "assistant", "content": " Four. "}
THANKS = {"role": "user", "content": "Merci, « é » 🌊"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": 'as in "Köln"'}},
            "required": ["city"],
        },
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "name": "weather",
            "arguments": {"city": "Köln"},
            "function": {"name": "weather", "arguments": {"city": "Köln"}},
        }
    ],
}
RESULT = {"role": "tool", "content": "rain"}
THOUGHT = {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nFour."}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "a&b"}, {"type": "image"}, {"type": "text", "text": "c"}],
}
SHORT, LONG = [USER], [SYSTEM, USER, ANSWER, THANKS]
NO_SYSTEM = [USER, ANSWER, THANKS]

# (template, messages, options)
CASES = [
    *((t, m, {}) for t in ("llama-2", "llama-3", "chatml", "qwen-3") for m in (SHORT, LONG)),
    *((t, m, {}) for t in ("mistral", "gemma", "phi-3", "zephyr") for m in (SHORT, NO_SYSTEM)),
    *((t, LONG, {}) for t in ("mistral", "phi-3", "zephyr", "gemma")),
    *((t, NO_SYSTEM, {"add_generation_prompt": False}) for t in ("phi-3", "llama-3", "gemma")),
    ("llama-2", [USER, THANKS], {}),
    ("llama-2", [ANSWER], {}),
    ("mistral", [USER, RESULT], {}),
    ("llama-3", SHORT, {"date": "1 Jan 2030", "bos_token": "<other>"}),
    ("llama-3", [*LONG, CALL, RESULT], {"tools": [TOOL]}),
    ("llama-3", [USER, CALL, {"role": "tool", "content": {"sky": "grey", "ö": 1}}], {}),
    ("qwen-3", [*LONG, CALL, RESULT, RESULT], {"tools": [TOOL, TOOL]}),
    ("qwen-3", [USER, THOUGHT, THANKS, THOUGHT], {}),
    ("qwen-3", SHORT, {"enable_thinking": False}),
    ("qwen-3", [USER, {**ANSWER, "tool_calls": None}, THANKS], {}),
    ("mistral", LONG, {"tools": [TOOL]}),
    ("named", LONG, {}),
    ("named", LONG, {"tools": [TOOL]}),
    ("named", LONG, {"chat_template": "rag", "documents": [{"title": "A", "text": "B"}]}),
    ("miscellany", [{"role": "note"}, USER, PARTS, {"role": "end"}, ANSWER], {}),
    ("miscellany", [USER], {"documents": [{"b": {"c": 1}, "a": "x"}]}),
    *(
        (t, [USER, {"role": "assistant", "content": open_end}], {"continue_final_message": True})
        for t in ("llama-3", "chatml", "gemma", "zephyr", "qwen-3")
        for open_end in ("Two and two are", "It is ")
    ),
]

NAMED = [
    {"name": "default", "template": CHATML},
    {"name": "tool_use", "template": "{{ tools | tojson }}{{ messages | length }}"},
    {"name": "rag", "template": "{% for d in documents %}{{ d.title }}: {{ d.text }}{% endfor %}"},
]
TEMPLATES = {
    "llama-2": LLAMA_2,
    "llama-3": LLAMA_3,
    "chatml": CHATML,
    "qwen-3": QWEN_3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "phi-3": PHI_3,
    "zephyr": ZEPHYR,
    "miscellany": MISCELLANY,
    "named": NAMED,
}
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def expectation(template, messages, options) -> dict[str, str]:
    """The text transformers renders, or the template's own objection."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>")), **SPECIAL_TOKENS
    )
    if isinstance(template, list):
        template = {t["name"]: t["template"] for t in template}
    tokenizer.chat_template = template
    if not options.get("continue_final_message"):
        options = {"add_generation_prompt": True} | options
    try:
        return {"text": tokenizer.apply_chat_template(messages, tokenize=False, **options)}
    except jinja2.TemplateError as error:
        return {"refusal": str(error)}


def main() -> int:
    cases = [
        {"template": name, "messages": messages, "options": options}
        | expectation(TEMPLATES[name], messages, options)
        for name, messages, options in CASES
    ]
    fixture = {
        "generator": f"transformers {__version__}, jinja2 {jinja2.__version__}",
        "special_tokens": SPECIAL_TOKENS,
        "templates": TEMPLATES,
        "cases": cases,
    }
    FIXTURE.write_text(json.dumps(fixture, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(cases)} cases, {sum('refusal' in case for case in cases)} of them refusals")
    return 0


if __name__ == "__main__":
    sys.exit(main())
