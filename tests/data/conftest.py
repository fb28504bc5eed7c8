"""A character tokenizer with a chat template, saved as a model directory would hold it."""

import pytest

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'critic' %}{{ raise_exception('no critics here') }}{% endif %}"
    "{% if m['role'] == 'assistant' %}<reply>{{ m['content'] }}<eos>"
    "{% else %}<user>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<reply>{% if thinking %}={% endif %}{% endif %}"
)
SYMBOLS = [*"0123456789+-*= ", "<eos>", "<user>", "<reply>"]


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: number for number, symbol in enumerate(SYMBOLS)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=[])),
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<reply>"],
    )
    tokenizer.chat_template = TEMPLATE
    directory = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(str(directory))
    return directory


@pytest.fixture
def tokenizer(model_directory):
    from jaxrl_llm.data.chat import load_tokenizer

    return load_tokenizer(model_directory)
