"""Tokenizers of several kinds, trained on a generated text, each with a chat template."""

import functools
import json
import random

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

WORDS = ["the", "sum", "of", "two", "numbers", "is", "naïve", "Grüße", "世界", "你好", "🙂"]
WORDS += ["\U0001f469\u200d\U0001f469\u200d\U0001f467", "def", "return", "x_1", "12", "345", "!="]
WORDS += ["\n", "", "", "-"]
TEMPLATE = (
    "{%- for m in messages %}{{- OPEN + m['role'] + '\\n' + m['content'] + END + '\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- OPEN + 'assistant\\n' }}"
    "{%- if thinking %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"
)


def corpus():
    draw = random.Random(7)
    return [" ".join(draw.choices(WORDS, k=12)) for _ in range(400)]


def finished(made, opening, end):
    made.add_special_tokens([AddedToken(text, special=True) for text in (opening, end)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end)
    tokenizer.chat_template = TEMPLATE.replace("OPEN", repr(opening)).replace("END", repr(end))
    return tokenizer


@functools.cache
def byte_level(size, opening="<|im_start|>", end="<|im_end|>"):
    """A byte-level BPE, as GPT-2, Llama 3 and Qwen have."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=letters, show_progress=False)
    made.train_from_iterator(corpus(), trainer)
    return finished(made, opening, end)


@functools.cache
def byte_fallback(size, opening="[USER]", end="</s>"):
    """A BPE of characters with bytes for unknown ones, as SentencePiece writes Llama 2's."""
    plain = Tokenizer(models.BPE())
    plain.normalizer = normalizers.Replace(" ", "▁")
    trainer = BpeTrainer(vocab_size=size, show_progress=False, limit_alphabet=60)
    plain.train_from_iterator(corpus(), trainer)
    model = json.loads(plain.to_str())["model"]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"], "▁▁"]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    merges = [("▁", "▁"), *map(tuple, model["merges"])]
    made = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return finished(made, opening, end)
