"""A policy: a Hugging Face directory or a run's checkpoint, to sample from and to train by hand."""

import dataclasses
import functools
import operator
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float32

from jaxrl_llm.algorithms.logprobs import TokenStats
from jaxrl_llm.config.errors import ConfigError, config_errors_at
from jaxrl_llm.config.load import read_yaml
from jaxrl_llm.config.sections import MeshConfig, ModelConfig
from jaxrl_llm.data.chat import Message, load_policy_tokens
from jaxrl_llm.data.dataset import PromptLike, as_prompts, check_ids
from jaxrl_llm.data.token_bytes import text_decoder
from jaxrl_llm.models.arrays import Params
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.hf.config import read_spec
from jaxrl_llm.models.hf.load import load_params
from jaxrl_llm.models.model import Model, base_model, for_length, is_adapted
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.rope import LongRopeScaling
from jaxrl_llm.monitoring.activity import activity
from jaxrl_llm.monitoring.clock import reporting_compilation
from jaxrl_llm.monitoring.tables import TokenTable
from jaxrl_llm.rollout.build import loaded_engine
from jaxrl_llm.rollout.engine import Engine, EngineSettings, SamplingParams
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.rollout.rollouts import Rollouts, sample
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.reshard import HOST
from jaxrl_llm.training.export import restore_model
from jaxrl_llm.training.forward import ForwardConfig, pack_batch, token_fields
from jaxrl_llm.training.load_model import (
    forward_config,
    merged_into_base,
    open_layout,
    own_rules,
    packed_shape,
)
from jaxrl_llm.types import Batch, Rows


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Policy:
    """A language model, with what it takes to sample from it and to train it.

    Its parameters never change: a loop of your own has its own, of which these are the first.

    Attributes:
        model: its functions, an adapter merged into it.
        params: the weights in float32, nested dicts of arrays.
        tokenizer: of transformers.
        stops: tokens that end an answer, as in training.
        layout: where the weights and rows of tokens are.
        dtype: of the computation.
        step: of the checkpoint, None for a directory.
        source: the directory, or that which a run's model began as.
    """

    model: Model
    params: Params
    tokenizer: Any
    stops: tuple[int, ...]
    layout: Layout
    dtype: str = "float32"
    step: int | None = None
    source: str = ""

    @functools.cached_property
    def forward(self) -> ForwardConfig:
        """How the model is run over packed rows; kernels are chosen when it is first used."""
        config = ModelConfig(path="", dtype=self.dtype)  # pyright: ignore[reportArgumentType]
        return forward_config(config, self.model, self.layout)

    @reporting_compilation()
    def open_engine(
        self,
        max_tokens: int,
        *,
        max_running_sequences: int = 256,
        cache_gb: float | None = None,
        layout: Layout | None = None,
    ) -> NativeEngine:
        """Build an engine that holds the weights, as version 0; its `load` takes others.

        Args:
            max_tokens: the longest sequence, prompt and answer.
            max_running_sequences: sequences decoded at once, in all.
            cache_gb: GB of each device for keys and values; None is enough for all sequences.
            layout: where it is; by default each device has all weights and a part of the sequences.

        Raises:
            ConfigError: the model has fewer positions, or was loaded for shorter ones, or there
                can be no such engine.
        """
        _check_factors(self.model, max_tokens)
        config, devices = MeshConfig(), list(self.layout.mesh.devices.flat)
        layout = layout or open_layout(config, "rollout", config.rollout, devices)
        rules = {**self.layout.rules, **layout.rules}  # a model's own axes have rules here only
        layout = dataclasses.replace(layout, rules=rules)
        settings = EngineSettings(max_running_sequences, max_tokens, cache_gb, self.dtype)
        return loaded_engine(self.model, self.params, settings, layout, self.tokenizer)

    @reporting_compilation()
    def sample(
        self,
        engine: Engine,
        prompts: Sequence[PromptLike],
        *,
        n: int = 1,
        max_new_tokens: int,
        seed: int | tuple[int, ...] = 0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> Rollouts:
        """Draw n answers to each prompt, which end in one of `stops`.

        Args:
            engine: holds weights of this model.
            prompts: each a text, which is a user's message, or the messages of a chat, both put
                into the chat template; or token ids, or a `Prompt` of `tokenize_prompts`.
            n: answers to each.
            max_new_tokens: the longest answer.
            seed: of this call; the same weights and seed give the same answers.
            temperature: what logits are divided by; 0 takes the likeliest token.
            top_p: sample from the smallest set of tokens with this mass.
            top_k: sample from the k likeliest tokens; 0 means all.

        Returns:
            B = n · len(prompts) prompts, completions (token ids and their log-probs) and texts;
            the answers to a prompt lie side by side.

        Raises:
            EngineError: a prompt and its answer don't fit.
            ValueError: a prompt is empty, or the chat template does not fit.
        """
        sampling = SamplingParams(max_new_tokens, temperature, top_p, top_k, stop_ids=self.stops)
        return sample(
            engine,
            as_prompts(prompts, self.tokenizer, vocab_size=self.model.vocab_size),
            sampling,
            samples=n,
            seed=(seed,) if isinstance(seed, int) else seed,
            decode=text_decoder(self.tokenizer),
        )

    def logprobs(
        self, text: str | Sequence[int], prompt: str | Sequence[Message] | Sequence[int] = ""
    ) -> TokenTable:
        """Return the log-prob of each token of a text, in nats, as the next one after those before.

        Args:
            text: as it stands, or token ids.
            prompt: that it answers: a user's message or the messages of a chat, both put into the
                chat template, or token ids. Without one, the text's first token has no log-prob and
                is left out.

        Raises:
            ValueError: there is no token to give a log-prob to, or more than the model's positions,
                or than it was loaded for.
        """
        before = as_prompts([prompt], self.tokenizer)[0].tokens if prompt else ()
        is_text = isinstance(text, str)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] if is_text else text
        tokens = [*before, *map(operator.index, ids)]
        check_ids(tokens, self.model.vocab_size, self.tokenizer)
        first, longest = max(1, len(before)), self.model.max_positions or sys.maxsize
        if not first < len(tokens) <= longest:
            raise ValueError(
                f"got {len(tokens)} tokens, of which the first has no log-prob: expected 2 to "
                f"{longest}, the model's positions"
            )
        width = min(64 * -(-len(tokens) // 64), longest)  # few lengths are compiled
        width += -width % (self.layout.pieces * self.layout.stages)
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(tokens)] = tokens
        batch = Batch(padded, np.array([len(tokens)], np.int32), {})
        stats = _token_logprobs(self.forward, self.layout.mesh, self.params, self.pack(batch))
        known = np.asarray(stats)[0, first : len(tokens)].tolist()
        decode = text_decoder(self.tokenizer, skip_special_tokens=False)
        pieces = [decode([token]) for token in tokens[first:]]
        return TokenTable(zip(pieces, known, strict=True))

    def pack(self, batch: Batch) -> Rows:
        """Pack a batch into rows of T tokens on the devices, sequences that fit side by side.

        Args:
            batch: B sequences of at most T tokens, as `lay_out` gives it. One that is too large
                for the devices is trained in parts: `take` some sequences, and add up gradients.

        Raises:
            ValueError: the devices that share a row can't share T columns, or a sequence is longer
                than the model was loaded for.
        """
        count, width = batch.tokens.shape
        _check_factors(self.model, int(np.max(batch.sequence_lengths, initial=0)))
        check_ids(batch.tokens, self.model.vocab_size, self.tokenizer)
        share = self.layout.pieces * self.layout.stages
        if width % share:
            raise ValueError(f"got a batch of {width} columns, expected a multiple of {share}")
        shape = packed_shape(
            self.layout, self.model, tokens=count * width, longest=width, sequences=count
        )
        return pack_batch(batch, shape, self.layout.mesh, self.forward.visuals)

    def token_stats(self, params: Params, rows: Rows, *, temperature: float = 1.0) -> TokenStats:
        """Run the model over packed rows; differentiable in the parameters, and made for `jax.jit`.

        Args:
            params: the weights, nested as those of the policy.
            rows: of `pack`.
            temperature: that of the policy, what its logits are divided by.

        Returns:
            Log-probs (`logprobs`), entropies and Σπ² [B T], in nats. Entry (i, t) is of token t of
            sequence i, given those before it. Token 0 and padding have zeros.
        """
        forward = dataclasses.replace(self.forward, temperature=temperature)
        return token_fields(params, rows, forward, self.layout.mesh)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _token_logprobs(
    forward: ForwardConfig, mesh: Mesh, params: Params, rows: Rows
) -> Float32[Array, "B T"]:
    return token_fields(params, rows, forward, mesh).logprobs


@reporting_compilation()
@activity("loading the weights")
def load_policy(
    path: str | Path,
    layout: Layout | None = None,
    *,
    dtype: str = "float32",
    step: int | None = None,
    on_host: bool = False,
    function_from: str | None = None,
    max_tokens: int | None = None,
    vision: bool = False,
) -> Policy:
    """Load the policy of a Hugging Face directory, or of a run.

    Args:
        path: a directory, or a repository of the hub; or the folder of a run.
        layout: where the weights go; by default all devices split them, and batches.
        dtype: of the computation, float32 or bfloat16; the weights are float32.
        step: which checkpoint of a run; None takes the newest.
        on_host: leave the weights of a directory in the host's memory, for an engine that makes a
            copy of its own. No computation can use them there.
        function_from: module or file that has the function which a notebook gave a run as
            `model.function`.
        max_tokens: the longest sequence, by which the factors of LongRoPE are chosen; None: within
            the model's original context, and longer ones are refused.
        vision: load the vision tower of a directory, too. That of a run always is, if it has one.

    Raises:
        ConfigError: nothing there can be read, it is no language model, or a directory has steps;
            with `vision`, there is no vision tower.
    """
    path, mesh = str(path), MeshConfig()
    layout = layout or open_layout(mesh, "train", mesh.train)
    if (Path(path) / "checkpoints").is_dir():
        trained = restore_model(path, step=step, function_from=function_from)
        model, source, step = trained.model, trained.source, trained.step
        if not isinstance(model, Decoder):  # a run has rules for the axes of its own model
            rules = read_yaml(Path(path) / "config.yaml")["mesh"]["rules"]
            rules = {**own_rules(rules, layout.rules, has_own_axes=True), **layout.rules}
            layout = dataclasses.replace(layout, rules=rules)
        homes = layout.of(base_model(model).declare())
        if is_adapted(model):
            params, model = merged_into_base(trained.params, model, source, homes)
        else:
            params = distributed.put(trained.params, homes)
    else:
        if step is not None:
            raise ConfigError(f"step={step}, but {path!r} is not a run: it has no checkpoints")
        source = path
        params, model = _of_directory(path, layout, on_host=on_host, vision=vision)
    if vision and model.vision is None:
        raise ConfigError(f"vision: {path} has no vision tower, expected one (docs/models.md)")
    with config_errors_at("model"):
        tokenizer, stops = load_policy_tokens(source, vocab_size=model.vocab_size)
        policy = Policy(
            model=model if max_tokens is None else for_length(model, max_tokens),
            params=params,
            tokenizer=tokenizer,
            stops=stops,
            layout=layout,
            dtype=dtype,
            step=step,
            source=source,
        )
    if not on_host:
        _ = policy.forward  # kernels are tried out now, as this can't be done inside of `jax.jit`
    return policy


def _of_directory(
    path: str, layout: Layout, *, on_host: bool, vision: bool
) -> tuple[Params, Model]:
    with config_errors_at("model"):
        spec = read_spec(path, vision=vision)
        if spec.value_head or spec.reward_head:
            raise ValueError(f"{path} ends in a value head, expected a language model")
        homes = layout.of(declare(spec))
        if on_host:
            homes = jax.tree.map(lambda s: s.with_memory_kind(HOST), homes)
        return load_params(path, spec, shardings=homes), Decoder(spec)


def _check_factors(model: Model, longest: int) -> None:
    """Refuse sequences for which LongRoPE has other factors than those that were chosen."""
    scaling = model.spec.rope_scaling if isinstance(model, Decoder) else None
    if isinstance(scaling, LongRopeScaling) and not scaling.long:
        original = scaling.original_positions
        if longest > original:
            raise ConfigError(
                f"got sequences of up to {longest} tokens, but the policy was loaded for at most "
                f"{original}, the original context of its LongRoPE: expected "
                f"load_policy(…, max_tokens={longest})"
            )
