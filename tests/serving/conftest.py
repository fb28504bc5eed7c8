"""A scripted engine, the quickstart's tokenizer of bytes, and servers on free ports."""

import asyncio
import contextlib
import functools
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.config.sections import LimitsConfig
from jaxrl_llm.data.chat import load_tokenizer, stop_ids
from jaxrl_llm.rollout.engine import Completion, Engine, EngineError
from jaxrl_llm.rollout.native.scheduler import EngineStats
from jaxrl_llm.rollout.openai_api.requests import ServedModel, text_limit
from jaxrl_llm.serving.app import make_app
from tests.listening import listening

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart"
NAME, KEY, MAX_TOKENS = "tiny", "secret", 256


class Scripted(Engine):
    """Answers with a text of its own, `steps` tokens at a time, until a stop or the limit.

    With traps, a prompt that holds a `!` is refused, one with a `?` hangs after a first piece.
    """

    def __init__(self, tokenizer, steps=5, stop=257, traps="!?"):
        self.tokenizer, self.steps, self.stop, self.traps = tokenizer, steps, stop, traps
        self.script = "Grüße, 世界: 🙂 one two three"
        self.requests, self.given_up, self.ended = [], [], 0

    def answer(self, request):
        tokens = [*self.tokenizer(self.script, add_special_tokens=False)["input_ids"], self.stop]
        tokens = tokens[: request.sampling.max_new_tokens]
        for i, token in enumerate(tokens):
            if token in request.sampling.stop_ids:
                return tokens[: i + 1], "stop", token
            before = self.tokenizer.decode(request.prompt, skip_special_tokens=True)
            whole = [*request.prompt, *tokens[: i + 1]]
            text = self.tokenizer.decode(whole, skip_special_tokens=True)[len(before) :]
            for stop in request.sampling.stop:
                if stop in text:
                    return tokens[: i + 1], "stop", stop
        return tokens, "length", None

    async def stream(self, request):
        prompt = self.tokenizer.decode(request.prompt) if self.traps else ""
        if "!" in prompt:
            raise EngineError("the prompt holds a !")
        self.requests.append(request)
        tokens, finish, stopped_by = self.answer(request)
        tops = request.sampling.top_logprobs
        try:
            for start in range(0, len(tokens), self.steps):
                await asyncio.sleep(0.001)
                part = np.asarray(tokens[start : start + self.steps], np.int32)
                size, top = len(part), None
                logprobs = -0.25 * np.arange(1, size + 1, dtype=np.float32)
                if tops:
                    others = np.tile(40 + np.arange(tops - 1, dtype=np.int32), (size, 1))
                    values = np.tile(-np.arange(1, tops + 1, dtype=np.float32), (size, 1))
                    top = np.concatenate([part[:, None], others], axis=1), values
                ends = (finish, stopped_by) if start + size == len(tokens) else ("", None)
                yield Completion(part, logprobs, np.zeros_like(part), *ends, top)
                if "?" in prompt:
                    await asyncio.sleep(1000)
            self.ended += 1
        except asyncio.CancelledError:
            self.given_up.append(request)
            raise

    async def generate(self, request):
        pieces = [piece async for piece in self.stream(request)]
        fields = [[getattr(p, name) for p in pieces] for name in Completion._fields[:3]]
        tops = [p.top for p in pieces]
        top = None if tops[0] is None else tuple(map(np.concatenate, zip(*tops, strict=True)))
        whole = map(np.concatenate, fields)
        return Completion(*whole, pieces[-1].finish, pieces[-1].stopped_by, top)

    def stats(self):
        running = len(self.requests) - self.ended - len(self.given_up)
        return EngineStats(running, 0, 3, 64, 0, 0, 5, 7, 2, 1)


@functools.cache
def sentencepiece():
    """Return a tokenizer as Llama 2's: ▁ for spaces, bytes for all else, no space at the start."""
    letters = [chr(i) for i in range(33, 127)]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": b + 3 for b in range(256)}
    for text in ["▁", "▁the", "▁world", "th", "▁t", "▁th", "▁w", "or", "ld", "▁wor", *letters]:
        vocab.setdefault(text, len(vocab))
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("▁", "w"), ("o", "r"), ("▁w", "or")]
    merges += [("l", "d"), ("▁wor", "ld")]
    bpe = models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    made = Tokenizer(bpe)
    replaced = normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replaced])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(QUICKSTART)


@pytest.fixture(scope="session")
def served(tokenizer):
    limit = text_limit(tokenizer, MAX_TOKENS)
    return ServedModel(NAME, tokenizer, stop_ids(tokenizer, QUICKSTART), 264, MAX_TOKENS, 8, limit)


@pytest.fixture
def engine(tokenizer):
    return Scripted(tokenizer)


@pytest.fixture
def start(engine, served):
    """(limits) -> the address of a server of the scripted engine."""
    with contextlib.ExitStack() as stack:

        def run(api_key=None, **limits):
            app = make_app(engine, served, LimitsConfig(**limits), api_key)
            return stack.enter_context(listening(app))

        yield run
