"""Small tokenizers for the chat templates of real models, which trl's wheel brings along."""

import functools
import importlib.util
import re
from pathlib import Path

import pytest

BOS = {"llama": "<|begin_of_text|>", "gemma": "<bos>", "deepseek": "<｜begin▁of▁sentence｜>"}
BOS |= {"lfm2": "<|startoftext|>", "mistral": "<s>", "cohere": "<BOS_TOKEN>"}
STOPS = {
    "qwen": ("<|im_end|>", "<|endoftext|>"),
    "lfm2": ("<|im_end|>",),
    "nemotron": ("<|im_end|>",),
    "llama": ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "gemma4": ("<turn|>", "<eos>", "<|tool_response>"),
    "gemma": ("<end_of_turn>", "<eos>"),
    "glm": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "phi": ("<|end|>", "<|endoftext|>"),
    "gptoss": ("<|return|>", "<|call|>", "<|endoftext|>"),
    "mistral": ("</s>",),
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
}
NOT_SPECIAL = ("<tool_call>", "</tool_call>", "<think>", "</think>")
NOT_SPECIAL += ("<tool_response>", "</tool_response>")
"""Added tokens of Qwen's tokenizers that are not special ones."""

MISTRAL = (
    "{{ bos_token }}{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}"
    "{% if m['role'] == 'user' %}"
    "{% if tools and m == users[-1] %}"
    "{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + (messages[0]['content'] + '\n\n' if loop.last and "
    "messages[0]['role'] == 'system' else '') + m['content'] + '[/INST]' }}"
    "{% elif m['role'] == 'system' and loop.first %}"
    "{% elif m['tool_calls'] %}{{ '[TOOL_CALLS] [' }}{% for call in m['tool_calls'] %}"
    "{% if call['id'] | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
    "{{ (call['function'] | tojson)[:-1] + ', \"id\": \"' + call['id'] + '\"}' }}"
    "{{ ', ' if not loop.last }}{% endfor %}{{ ']' + eos_token }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + (m['content'] | trim) + eos_token }}"
    "{% elif m['role'] == 'tool' %}"
    "{% if m['tool_call_id'] | length != 9 %}"
    "{{ raise_exception('ids have nine letters') }}{% endif %}"
    "{{ '[TOOL_RESULTS] {\"content\": ' + (m['content'] | tojson) + ', \"call_id\": \"' }}"
    "{{ m['tool_call_id'] + '\"}[/TOOL_RESULTS]' }}"
    "{% else %}{{ raise_exception('unknown role ' + m['role']) }}{% endif %}{% endfor %}"
)
"""As Mistral's third: tools stand before the last question, ids have nine letters or digits."""

DEEPSEEK_V31 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' %}"
    "{% if loop.index0 > 0 and messages[loop.index0 - 1]['role'] == 'user' %}"
    "{{ '<｜Assistant｜></think>' }}{% endif %}{{ m['content'] or '' }}"
    "{% if m['tool_calls'] %}{{ '<｜tool▁calls▁begin｜>' }}{% for call in m['tool_calls'] %}"
    "{{ '<｜tool▁call▁begin｜>' + call['function']['name'] + '<｜tool▁sep｜>' }}"
    "{{ call['function']['arguments'] + '<｜tool▁call▁end｜>' }}{% endfor %}"
    "{{ '<｜tool▁calls▁end｜>' }}{% endif %}{{ '<｜end▁of▁sentence｜>' }}"
    "{% elif m['role'] == 'tool' %}"
    "{{ '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt and messages[-1]['role'] == 'user' %}"
    "{{ '<｜Assistant｜></think>' }}{% endif %}"
)
WRITTEN = {"mistral": MISTRAL, "deepseekv31": DEEPSEEK_V31}
MARKER = re.compile(r"<[|｜][^|｜<>\s]+[|｜]>|<\|?[a-z_]+\|?>|</[a-z_]+>|\[/?[A-Z_]+\]")


def find_template(name):
    """Return the source of a template; the test is skipped where trl is not installed."""
    if name in WRITTEN:
        return WRITTEN[name]
    package = importlib.util.find_spec("trl")
    if package is None:
        pytest.skip("trl, whose wheel has the templates, is not installed")
    path = Path(package.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja"
    if not path.is_file():
        pytest.skip(f"this trl has no template {name}")
    return path.read_text(encoding="utf-8")


def family_of(name, table):
    """Return what a table has for the longest beginning of the name."""
    return table.get(max((k for k in table if name.startswith(k)), key=len, default=""))


@functools.cache
def build(name, stops=None):
    """Return a byte-level tokenizer with a family's special tokens and template, and its stops."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    template = find_template(name)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("Ġ", "th"), ("i", "n"), ("e", "r"), ("Ċ", "Ċ"), ("<", "|"), ("|", ">")]
    vocabulary = letters + ["".join(pair) for pair in merges]
    model = models.BPE(vocab={text: i for i, text in enumerate(vocabulary)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    stops = stops or family_of(name, STOPS) or ("<|im_end|>",)
    bos = family_of(name, BOS)
    markers = {*MARKER.findall(template), *stops, *([bos] if bos else []), "<|im_start|>"}
    markers -= {"<tools>", "</tools>", "<parameter>", "</parameter>", "<function>", "</function>"}
    tokenizer.add_tokens(
        [AddedToken(m, special=m not in NOT_SPECIAL, normalized=False) for m in sorted(markers)]
    )
    built = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=stops[0], bos_token=bos)
    built.chat_template = template
    return built, tuple(built.convert_tokens_to_ids(stop) for stop in stops)
