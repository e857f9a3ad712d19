"""Chat templates render the text of transformers, in a sandbox; `LM.chat` answers."""

import datetime
import enum
import json
from pathlib import Path

import numpy as np
import pytest

import fdjax
from fdjax.models import CheckpointError
from fdjax.text.chat_template import ChatTemplate
from fdjax.text.conversation import chat_ids
from fdjax.text.tokenizer import MissingTokenizerError, Tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures" / "hf"
TRUTH = json.loads((FIXTURES / "chat.json").read_text(encoding="utf-8"))
HI = [{"role": "user", "content": "Hi"}]
QUESTION = [{"role": "user", "content": "What is the largest ocean?"}]
ANSWER = "The largest ocean is the Pacific Ocean."

pytestmark = pytest.mark.usefixtures("quick_compiles")


def write_template(folder: Path, template, special_tokens=TRUTH["special_tokens"]) -> ChatTemplate:
    data = {"chat_template": template, **special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(data), encoding="utf-8")
    return ChatTemplate.from_folder(folder)


def render(source: str, messages=HI, **options) -> str:
    return ChatTemplate({"default": source}, TRUTH["special_tokens"]).render(messages, **options)


# --- rendering


@pytest.mark.parametrize("case", TRUTH["cases"], ids=lambda c: c["template"])
def test_texts_are_those_of_transformers(case, tmp_path):
    template = write_template(tmp_path, TRUTH["templates"][case["template"]])
    options = case["options"]
    if not options.get("continue_final_message"):
        options = {"add_generation_prompt": True} | options
    if "refusal" in case:
        with pytest.raises(ValueError, match="refuses these messages") as caught:
            template.render(case["messages"], **options)
        assert str(caught.value).endswith(case["refusal"])
    else:
        assert template.render(case["messages"], **options) == case["text"]


def test_the_fixture_has_what_it_is_for():
    assert len(TRUTH["templates"]) >= 9
    assert sum("refusal" in case for case in TRUTH["cases"]) >= 3


def test_where_templates_are_found_and_which_goes_first(tmp_path):
    assert not ChatTemplate.from_folder(tmp_path)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ 4 }}"}')
    assert ChatTemplate.from_folder(tmp_path).render(HI) == "4"
    assert write_template(tmp_path, None).render(HI) == "4"
    assert write_template(tmp_path, "{{ 3 }}").render(HI) == "3"
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "rag.jinja").write_text("{{ 2 }}")
    template = ChatTemplate.from_folder(tmp_path)
    assert template.render(HI, chat_template="rag") == "2"
    with pytest.raises(ValueError, match="no default template; name one of rag"):
        template.render(HI)
    (tmp_path / "chat_template.jinja").write_text("{{ 1 }}\n{{ 'é' }}", encoding="utf-8")
    template = ChatTemplate.from_folder(tmp_path)
    assert template.render(HI) == "1\né"
    assert template.render(HI, chat_template="rag") == "2"


def test_special_tokens_are_texts_or_dicts_of_either_file(tmp_path):
    older = {"bos_token": {"content": "<s>"}, "pad_token": "<pad>", "additional": ["<a>"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    tokens = {"bos_token": "<newer>", "eos_token": {"content": "</s>", "lstrip": False}}
    tokens |= {"image_token": "<img>", "unk_token": None, "add_bos_token": True}
    source = "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ image_token }}{{ unk_token }}"
    assert write_template(tmp_path, source, tokens).render(HI) == "<s></s><pad><img>"


def test_the_date_is_todays():
    before = datetime.datetime.now()
    text = render("{{ strftime_now('%Y-%m-%d') }}")
    assert f"{before:%Y-%m-%d}" <= text <= f"{datetime.datetime.now():%Y-%m-%d}"


def test_a_template_of_the_callers_own():
    template = ChatTemplate({})
    assert not template
    assert template.render(HI, chat_template="{{ messages[0].content }}") == "Hi"
    with pytest.raises(ValueError, match="line 1"):
        template.render(HI, chat_template="{% for %}")
    for wrong in (5, b"default", ["default"]):
        with pytest.raises(ValueError, match="chat_template must be a name or Jinja, got "):
            template.render(HI, chat_template=wrong)
    with pytest.raises(ValueError, match="'typo' is neither Jinja nor a name"):
        template.render(HI, chat_template="typo")
    with pytest.raises(ValueError, match="the names are default, other"):
        ChatTemplate({"other": "", "default": ""}).render(HI, chat_template="typo")


# --- the sandbox


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].clear() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self.__init__.__globals__ }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ ['{0.__class__.__mro__}']|map('format', 1)|list }}",
        "{% import 'os' as os %}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source):
    try:
        text = render(source)
    except ValueError as error:
        assert "\n" not in str(error)
    else:  # Jinja treats such an attribute as undefined, and renders nothing.
        assert text in ("", "[]")


def test_a_template_sees_plain_data_and_leaves_the_messages_alone():
    class Role(str, enum.Enum):  # noqa: UP042 - the mixture is the point
        USER = "user"

        def shout(self):
            raise AssertionError("called")

    messages = [{"role": Role.USER, "content": ("a", "b"), "extra": None}]
    source = "{{ messages[0].role.shout is defined }} {{ messages[0] }}"
    assert render(source, messages) == "False {'role': 'user', 'content': ['a', 'b']}"
    render("{{ messages[0].content }}", HI, add_generation_prompt=True)
    open_end = [{"role": "assistant", "content": "It is"}]
    assert render("{{ messages[0].content }}", open_end, continue_final_message=True) == "It is"
    assert open_end == [{"role": "assistant", "content": "It is"}]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "Hi",
        {"role": "user", "content": "Hi"},
        None,
        5,
        [{"content": "Hi"}],
        [{"role": 1, "content": "Hi"}],
        ["Hi"],
        [None],
        [{"role": "user", "content": b"Hi"}],
        [{"role": "user", "content": np.zeros(2)}],
        [{"role": "user", "content": {1, 2}}],
    ],
    ids=repr,
)
def test_what_are_no_messages(messages):
    with pytest.raises(ValueError, match=r"^chat: message") as caught:
        render("{{ messages }}", messages)
    assert "\n" not in str(caught.value)


def test_options_that_make_no_sense():
    with pytest.raises(ValueError, match="exclude each other"):
        render("", HI, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(ValueError, match="must be True or False, got 'reasoning_content'"):
        render("{{ messages }}", HI, continue_final_message="reasoning_content")
    with pytest.raises(ValueError, match="must be a text"):
        render("", [{"role": "assistant", "content": ["a"]}], continue_final_message=True)
    with pytest.raises(ValueError, match="does not show"):
        render("{{ 1 }}", HI, continue_final_message=True)
    with pytest.raises(ValueError, match="tools must be JSON"):
        render("{{ 1 }}", HI, tools=[print])


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content + 1 }}", "{{ 1 / 0 }}", "{{ undefined.x }}", "{{ [][0].x }}"]
    + ["{{ messages[0].content.index('z') }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"]
    + ["{{ raise_exception('a\\nb') }}", "{{ raise_exception() }}"],
)
def test_a_template_that_fails_is_one_line(source):
    with pytest.raises(ValueError, match=r"^chat: the template (refuses|fails)") as caught:
        render(source)
    assert "\n" not in str(caught.value)


# --- damage


@pytest.mark.parametrize(
    "template",
    [5, True, ["text"], [{"name": "default"}], [{"template": "x"}], [{"name": 1, "template": "x"}]]
    + [[{"name": ["x"], "template": "y"}], {"default": 3}],
    ids=repr,
)
def test_a_template_of_another_type(tmp_path, template):
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: 'chat_template' must be"):
        write_template(tmp_path, template)


def test_a_template_that_is_not_jinja_is_the_checkpoints_fault(tmp_path):
    template = write_template(tmp_path, "a\n{% if %}")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: .* \(line 2: "):
        template.render(HI)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_file_that_is_not_text(tmp_path, file):
    (tmp_path / file).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=file):
        ChatTemplate.from_folder(tmp_path)


def test_templates_are_read_with_the_tokenizer(tmp_path):
    """Later changes of the folder change no answer, and damage shows at once."""
    write_template(tmp_path, "{{ messages[0].content }}")
    tokenizer = Tokenizer(tmp_path)
    write_template(tmp_path, "another")
    assert tokenizer.chat_template.render([{"role": "user", "content": "a b"}]) == "a b"
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 5}')
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: 'chat_template' must be"):
        Tokenizer(tmp_path)


# --- ids


@pytest.mark.parametrize("case", ["llama2_mha", "llama3_gqa_tied"])
def test_a_prompt_begins_with_one_bos(case):
    tokenizer = Tokenizer(FIXTURES / case)
    tokenizer.chat_template = ChatTemplate({"default": "{{ bos_token }}{{ messages[0].content }}"})
    tokens = ChatTemplate.from_folder(FIXTURES / case).special_tokens
    text = tokens["bos_token"] + "a b"
    bos = tokenizer.encode("")[0]
    assert tokenizer.token(bos) == tokens["bos_token"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert (ids[0], ids.count(bos)) == (bos, 1)
    # As a prompt, the same text would get one more special token.
    assert tokenizer.encode(text)[:2] == [bos, bos]


# --- answers


@pytest.fixture(scope="module")
def lm():
    return fdjax.load("tiny", compilation_cache=False, progress=False)


def test_an_answer(lm):
    result = lm.chat(QUESTION)
    assert result.text.strip() == ANSWER
    assert result.finish_reasons == ["stop"]
    # The embedded model's template renders a question as its prompt.
    assert result.tokens == lm.generate(QUESTION[0]["content"]).tokens


def test_a_conversation_goes_on(lm):
    history = [*QUESTION, {"role": "assistant", "content": ANSWER}]
    history.append({"role": "user", "content": "What is 7 + 5?"})
    assert lm.chat(history).text.strip() == "7 + 5 = 12."
    assert len(chat_ids(lm.tokenizer, history)) > len(chat_ids(lm.tokenizer, QUESTION)) + 10


def test_pieces_joined_are_the_answer(lm):
    assert "".join(lm.stream_chat(QUESTION)) == lm.chat(QUESTION).text


def test_the_model_goes_on_with_a_message(lm):
    begun = [*QUESTION, {"role": "assistant", "content": "The largest ocean is"}]
    assert lm.chat(begun, continue_final_message=True).text == " the Pacific Ocean."


@pytest.fixture
def calls(lm, monkeypatch):
    """The arguments that `generate` got."""
    seen = []
    monkeypatch.setattr(lm, "generate", lambda *a, **k: seen.append((a, k)))
    return seen


def test_options_go_to_the_template_or_to_generate(lm, calls):
    source = "{{ style }}{{ tools | length }}{{ documents[0].a }}{{ messages[0].content }}"
    lm.chat(
        HI,
        max_new_tokens=3,
        temperature=0.5,
        tools=[{}, {}],
        documents=[{"a": "x"}],
        chat_template=source,
        chat_template_kwargs={"style": "s"},
    )
    ((prompts, config), options) = calls[0]
    assert (prompts, config) == ([lm.tokenizer.encode("s2xHi", add_special_tokens=False)], None)
    assert (options["max_new_tokens"], options["temperature"]) == (3, 0.5)
    assert set(options) <= {"max_new_tokens", "temperature", "eos_token_ids"}


@pytest.mark.parametrize("kwargs", [3, {"messages": []}])
def test_what_is_no_variable_of_a_template_is_refused(lm, kwargs):
    with pytest.raises(ValueError, match="chat_template_kwargs must be a dict"):
        lm.chat(HI, chat_template_kwargs=kwargs)


@pytest.mark.parametrize("method", ["chat", "stream_chat"])
def test_a_template_that_makes_nothing_is_blamed(lm, method):
    with pytest.raises(ValueError, match="the chat template renders an empty text"):
        getattr(lm, method)(HI, chat_template="{{ '' }}")


def test_a_template_that_is_given_is_blamed_itself(lm):
    with pytest.raises(ValueError, match=r"^chat: chat_template is not valid Jinja \(line 1"):
        lm.chat(HI, chat_template="{% if %}")


def test_conversations_make_a_batch(lm, calls):
    other = [{"role": "user", "content": "What is 7 + 5?"}]
    lm.chat([QUESTION, other])
    lm.chat((tuple(QUESTION),))
    prompts = [args[0] for args, _ in calls]
    assert prompts == [
        [chat_ids(lm.tokenizer, QUESTION), chat_ids(lm.tokenizer, other)],
        [chat_ids(lm.tokenizer, QUESTION)],
    ]


def test_an_answer_ends_where_tokenizer_config_says(lm, calls, monkeypatch):
    monkeypatch.setattr(lm.tokenizer, "special_tokens", {"eos_token": "<pad>"})
    known, pad = lm.defaults.eos_token_ids, lm.tokenizer.eos_token_id
    assert lm.tokenizer.token(pad) == "<pad>" and pad not in known
    lm.chat(HI)
    lm.chat(HI, eos_token_ids=None)
    lm.chat([HI, HI], eos_token_ids=[None, [7]])
    lm.chat(HI, eos_token_id=7)
    lm.chat(HI, fdjax.GenerationConfig(max_new_tokens=5))
    lm.chat(HI, fdjax.GenerationConfig(eos_token_ids=7))
    both = (*known, pad)
    ends = [options.get("eos_token_ids", options.get("eos_token_id")) for _, options in calls]
    assert ends == [both, both, [both, [7]], 7, both, None]


def test_without_template_or_tokenizer_an_error_says_so(lm, monkeypatch):
    monkeypatch.setattr(lm, "tokenizer", Tokenizer())
    with pytest.raises(ValueError, match="this model has no chat template"):
        lm.chat(HI)
    with pytest.raises(MissingTokenizerError):
        lm.chat(HI, chat_template="{{ messages }}")


def test_an_unknown_option_is_named(lm):
    with pytest.raises(TypeError, match="temprature"):
        lm.chat(HI, temprature=1)
