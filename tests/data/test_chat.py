import json
import shutil

import pytest

from jaxrl_llm.data.chat import encode_prompt, load_tokenizer, stop_ids

CHAT = [{"role": "user", "content": "1+2="}]
EOS, USER, REPLY = 15, 16, 17


def test_what_a_template_makes_of_messages(tokenizer):
    plain = encode_prompt(tokenizer, CHAT)
    assert plain == [USER, 1, 10, 2, 13, REPLY]
    chat = [{"role": "system", "content": "7"}, {"role": "user", "content": "8"}]
    assert encode_prompt(tokenizer, chat) == [USER, 7, USER, 8, REPLY]
    assert encode_prompt(tokenizer, CHAT, thinking=False) == plain
    assert encode_prompt(tokenizer, CHAT, thinking=True) == [*plain, 13]
    with pytest.raises(ValueError, match="enable_thinking"):
        encode_prompt(tokenizer, CHAT, enable_thinking=False)
    with pytest.raises(ValueError, match=r"critic.*critics"):
        encode_prompt(tokenizer, [{"role": "critic", "content": "1"}])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"chat_template.jinja"):
        encode_prompt(tokenizer, CHAT)


def test_directories_without_a_tokenizer(model_directory, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes.txt").write_text("nothing")
    shutil.copytree(model_directory, tmp_path / "broken")
    (tmp_path / "broken/tokenizer.json").write_text('{"version": "1.0", "model"')
    for name, named in (("gone", "gone"), ("empty", "no files"), ("other", "notes.txt")):
        with pytest.raises(ValueError, match=f"^tokenizer.*{named}"):
            load_tokenizer(tmp_path / name)
    with pytest.raises(ValueError, match=r"^tokenizer"):
        load_tokenizer(tmp_path / "broken")


def test_stop_ids_join_both_sources(tokenizer, tmp_path):
    for config, expected in [
        *(({}, (EOS,)), ({"eos_token_id": 3}, (3, EOS)), ({"eos_token_id": [EOS, 2]}, (2, EOS)))
    ]:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
        assert stop_ids(tokenizer, tmp_path) == expected


def test_stop_ids_without_generation_config(tokenizer, tmp_path):
    """As transformers, which makes a model's generation config of its config then."""
    import transformers

    assert stop_ids(tokenizer, tmp_path) == (EOS,)
    text = {"model_type": "gemma3_text", "eos_token_id": [1, 106]}
    for config in (
        {"model_type": "llama", "eos_token_id": [2, 3]},
        {"model_type": "gemma3", "text_config": text, "vision_config": {}, "eos_token_id": None},
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        loaded = transformers.AutoConfig.from_pretrained(tmp_path)
        theirs = transformers.GenerationConfig.from_model_config(loaded).eos_token_id
        assert stop_ids(tokenizer, tmp_path) == (*sorted([*theirs, EOS]),)


def test_stop_ids_that_are_refused(tokenizer, tmp_path):
    path = tmp_path / "generation_config.json"
    for text in ('{"eos_token_id": "</s>"}', '{"eos_token_id": [1, "2"]}', "{", "[15]"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"eos_token_id|generation_config.json"):
            stop_ids(tokenizer, tmp_path)
    path.unlink()
    tokenizer.eos_token = tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"^stop"):
        stop_ids(tokenizer, tmp_path)
