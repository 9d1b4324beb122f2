"""Prompts as the model reads them: one BOS whoever writes it, templates where they belong."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from storage.errors import UserError
from storage.rendering import Renderer

BOS, EOS = 1, 2
CHARACTERS = ["<pad>", "<bos>", "<eos>", "\n", *map(chr, range(32, 127))]
PLAIN = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
WITH_BOS = "{{ bos_token }}" + PLAIN
WITH_TWO = "{{ bos_token }}" + WITH_BOS
MESSAGES = [{"role": "user", "content": "1+1="}]


def tokenizer(template=None, *, bos=True, adds=False):
    """A character tokenizer; ``adds``: it puts BOS and EOS around text by itself."""
    backend = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    if adds:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A <eos>", special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
        )
    special = {"bos_token": "<bos>"} if bos else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", chat_template=template, **special
    )


def ids(text):
    return [CHARACTERS.index(c) for c in text]


@pytest.mark.parametrize("template", [None, PLAIN, WITH_BOS, WITH_TWO])
@pytest.mark.parametrize("adds", [False, True])
def test_there_is_exactly_one_bos_whoever_writes_it(template, adds):
    made = tokenizer(template, adds=adds)
    _, tokens = Renderer(made, chat_template=None).render("1+1=")
    assert tokens.dtype == np.int32
    assert tokens[0] == BOS
    assert np.count_nonzero(tokens == BOS) == 1
    assert EOS not in tokens
    assert tokens[1:].tolist() == ids("1+1=" if template is None else "[user] 1+1=\n[assistant] ")


def test_naive_tokenising_would_repeat_the_bos():
    made = tokenizer(WITH_BOS, adds=True)
    text = made.apply_chat_template(MESSAGES, tokenize=False)
    assert made(text)["input_ids"].count(BOS) == 2


@pytest.mark.parametrize("template", [None, PLAIN])
def test_tokenizer_without_bos_gets_none(template):
    text, tokens = Renderer(tokenizer(template, bos=False), chat_template=None).render("1+1=")
    assert tokens.tolist() == ids(text)


def test_bos_that_separates_turns_stays():
    made = tokenizer("{% for m in messages %}<bos>{{ m.content }}{% endfor %}")
    _, tokens = Renderer(made, chat_template=None).render([*MESSAGES, {"role": "user", "content": "2"}])
    assert tokens.tolist() == [BOS, *ids("1+1="), BOS, *ids("2")]


def test_template_is_used_where_it_belongs():
    chat, plain = tokenizer(PLAIN), tokenizer()
    rendered = "[user] 1+1=\n[assistant] "
    assert Renderer(chat, chat_template=None).render("1+1=")[0] == rendered
    assert Renderer(chat, chat_template=None).render(MESSAGES)[0] == rendered
    assert Renderer(chat, chat_template=True).render("1+1=")[0] == rendered
    assert Renderer(chat, chat_template=False).render("1+1=")[0] == "1+1="
    assert Renderer(plain, chat_template=None).render("1+1=")[0] == "1+1="


def test_system_prompt_stands_before_every_prompt():
    renderer = Renderer(tokenizer(PLAIN), chat_template=None, system_prompt="Short.")
    expected = "[system] Short.\n[user] 1+1=\n[assistant] "
    assert renderer.render("1+1=")[0] == renderer.render(MESSAGES)[0] == expected
    assert renderer.render(MESSAGES)[0] == expected, "the caller's messages are left alone"


@pytest.mark.parametrize(
    ("template", "arguments", "expected"),
    [
        (None, {"chat_template": True}, r"model\.chat_template=true, but .* no chat template"),
        (None, {"chat_template": None, "system_prompt": "x"}, r"data\.system_prompt needs a chat template"),
        (
            PLAIN,
            {"chat_template": False, "system_prompt": "x"},
            r"data\.system_prompt .* model\.chat_template is false",
        ),
    ],
)
def test_settings_that_need_a_template_are_refused_without_one(template, arguments, expected):
    with pytest.raises(UserError, match=expected):
        Renderer(tokenizer(template), **arguments)


@pytest.mark.parametrize(
    ("template", "chat_template", "prompt", "expected"),
    [
        (None, None, MESSAGES, "list of messages, and the model's tokenizer has no chat template"),
        (PLAIN, False, MESSAGES, r"list of messages, but model\.chat_template is false"),
        (PLAIN, None, 17, "of type int"),
        (PLAIN, None, None, "of type NoneType"),
        (PLAIN, None, b"1+1", "of type bytes"),
        (PLAIN, None, [], "empty list"),
        (PLAIN, None, ["1+1"], "message 1 is of type str"),
        (PLAIN, None, [*MESSAGES, {"role": "user"}], "content of message 2 is missing"),
        (PLAIN, None, [{"role": 3, "content": "x"}], "role of message 1 is not text"),
        (PLAIN, None, [*MESSAGES, {"role": "assistant", "content": "2"}], "last message is the assistant's"),
        ("{{ raise_exception('roles must alternate') }}", None, MESSAGES, "messages of user: roles must alternate"),
        ("{{ messages[7].content.nothing }}", None, MESSAGES, "cannot render messages of user"),
    ],
)
def test_prompt_that_cannot_be_rendered_is_refused(template, chat_template, prompt, expected):
    renderer = Renderer(tokenizer(template), chat_template=chat_template)
    with pytest.raises(UserError, match=expected):
        renderer.render(prompt)


def test_system_message_of_the_data_and_a_system_prompt_exclude_each_other():
    renderer = Renderer(tokenizer(PLAIN), chat_template=None, system_prompt="Short.")
    with pytest.raises(UserError, match=r"system message of its own"):
        renderer.render([{"role": "system", "content": "Long."}, *MESSAGES])


def test_text_that_the_tokenizer_does_not_know_is_refused():
    made = tokenizer()
    made.unk_token = "<pad>"
    renderer = Renderer(made, chat_template=None)
    assert len(renderer.render("one stray letter \N{GREEK SMALL LETTER PI}")[1]) == 1 + 18
    with pytest.raises(UserError, match="does not know 2 of its 6 tokens"):
        renderer.render("2\N{GREEK SMALL LETTER PI}r=\N{GREEK SMALL LETTER PI}1")


def test_decoding_drops_special_tokens():
    renderer = Renderer(tokenizer(), chat_template=None)
    answer = np.array([BOS, *ids("1 + 1 ,\n= 2"), EOS], np.int32)
    assert renderer.decode(answer) == "1 + 1 ,\n= 2"
    assert renderer.decode(answer.tolist()) == "1 + 1 ,\n= 2"
    assert renderer.decode(np.zeros(0, np.int32)) == ""
