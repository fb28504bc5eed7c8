"""Chat templates and stop tokens, on a real `transformers` tokenizer loaded from disk."""

import json
import re

import pytest

from jaxrl_llm.data.chat import encode_prompt, load_tokenizer, stop_ids

CHAT = [{"role": "user", "content": "1+2="}]
EOS, USER, REPLY = 15, 16, 17


def test_prompt_ends_in_the_generation_prompt(tokenizer):
    assert encode_prompt(tokenizer, CHAT) == [USER, 1, 10, 2, 13, REPLY]


def test_several_messages_in_order(tokenizer):
    chat = [{"role": "system", "content": "7"}, {"role": "user", "content": "8"}]
    assert encode_prompt(tokenizer, chat) == [USER, 7, USER, 8, REPLY]


def test_template_variable_takes_effect(tokenizer):
    plain = encode_prompt(tokenizer, CHAT, thinking=False)
    assert encode_prompt(tokenizer, CHAT, thinking=True) == [*plain, 13]


def test_unknown_template_variable_is_refused(tokenizer):
    with pytest.raises(ValueError, match="no variable 'enable_thinking'; remove the keyword"):
        encode_prompt(tokenizer, CHAT, enable_thinking=False)


def test_chat_that_the_template_refuses(tokenizer):
    with pytest.raises(
        ValueError, match=r"refuses a chat with roles \['critic'\]: no critics here"
    ):
        encode_prompt(tokenizer, [{"role": "critic", "content": "1"}])


def test_tokenizer_without_template(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"the tokenizer has none; .*chat_template.jinja"):
        encode_prompt(tokenizer, CHAT)


def test_missing_directory():
    with pytest.raises(ValueError, match=r"expected a local model .*: no directory '/no/model'"):
        load_tokenizer("/no/model")


def test_directory_without_tokenizer(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(ValueError, match=r"can't load one from .* \(it holds notes.txt\)"):
        load_tokenizer(tmp_path)


def test_empty_directory(tmp_path):
    with pytest.raises(ValueError, match="it holds no files"):
        load_tokenizer(tmp_path)


def test_broken_tokenizer_file(model_directory, tmp_path):
    for path in model_directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(ValueError, match="tokenizer: can't load one from"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("config", "expected"),
    [({}, (EOS,)), ({"eos_token_id": 3}, (3, EOS)), ({"eos_token_id": [EOS, 2]}, (2, EOS))],
)
def test_stop_ids_join_both_sources(tokenizer, tmp_path, config, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert stop_ids(tokenizer, tmp_path) == expected


@pytest.mark.parametrize("generation", [None, {}])
def test_stop_ids_without_generation_config(tokenizer, tmp_path, generation):
    """As transformers, which makes a model's generation config of its config then."""
    import transformers

    assert stop_ids(tokenizer, tmp_path) == (EOS,)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    text = {"model_type": "gemma3_text", "eos_token_id": [1, 106]}
    for config in (
        {"model_type": "llama", "eos_token_id": [2, 3]},
        {"model_type": "gemma3", "text_config": text, "vision_config": {}, "eos_token_id": None},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        loaded = transformers.AutoConfig.from_pretrained(tmp_path)
        theirs = transformers.GenerationConfig.from_model_config(loaded).eos_token_id
        assert stop_ids(tokenizer, tmp_path) == (*sorted([*theirs, EOS]),)


def test_no_stop_id_at_all(tokenizer, tmp_path):
    tokenizer.eos_token = tokenizer.chat_template = None
    with pytest.raises(ValueError, match="a reply could never end"):
        stop_ids(tokenizer, tmp_path)


@pytest.mark.parametrize("value", ["</s>", [1, "2"], True, 1.5])
def test_stop_id_of_the_wrong_type(tokenizer, tmp_path, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    message = "expected an id or a list of ids as eos_token_id in .*, got " + re.escape(repr(value))
    with pytest.raises(ValueError, match=message):
        stop_ids(tokenizer, tmp_path)


@pytest.mark.parametrize("text", ["{", "[15]"])
def test_generation_config_that_is_no_object(tokenizer, tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"can't read .*generation_config.json"):
        stop_ids(tokenizer, tmp_path)
