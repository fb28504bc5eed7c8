"""How far the engine's log-probs are from the trainer's, with and without its choices of experts.

    python -m benchmarks.generation.router_replay [--answers 32]

A random mixture of 64 experts, 2 for each token, in 4 layers samples answers. The trainer's forward
pass computes the same tokens' log-probs in float32: by the experts that its own routers choose, and
by those that the engine recorded (`model.router_replay: rollout`). The table tells tokens apart
that were drawn from a state for which the trainer's routers choose otherwise than the engine's, in
a layer at least. The engine differs from the trainer in one of two ways:

- its routers' weights are off by a thousandth or a hundredth, each by a random share, and all else
  is the same in float32, so that routers alone disagree;
- it computes in bfloat16, so that all of it is rounded, too. The last line is of such a model with
  2 experts, which all tokens take: nothing is chosen there, and rounding is what is left.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.tables import describe_run, markdown_table, parser_of
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.inputs import RowInputs
from jaxrl_llm.models.moe.spec import MoeSpec
from jaxrl_llm.models.parameters import declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.engine import Completion, EngineSettings, Request, SamplingParams
from jaxrl_llm.rollout.native.engine import NativeEngine
from jaxrl_llm.sharding.layout import Layout, make_mesh

PROMPT, ANSWER, EXPERTS, TOP, VOCAB = 16, 48, 64, 2, 256


def mixture_of(experts: int) -> ModelSpec:
    """Return a small model with so many experts."""
    return ModelSpec(
        vocab_size=VOCAB,
        hidden_size=64,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ff_width=64,
        rope_theta=1e4,
        norm_eps=1e-6,
        tied_embeddings=False,
        max_positions=PROMPT + ANSWER,
        moe=MoeSpec(experts=experts, experts_per_token=TOP, ff_width=64),
    )


def draw_params(spec: ModelSpec) -> Any:
    """Draw weights under which most of the residual stream is what experts have added."""
    rng = np.random.default_rng(0)

    def one(path: Any, decl: Any) -> jax.Array:
        inputs = spec.hidden_size if len(decl.shape) < 2 else decl.shape[-2]
        scale = 3.0 if "expert_down" in jax.tree_util.keystr(path) else 1.0
        values = scale * inputs**-0.5 * rng.normal(size=decl.shape)
        return jnp.asarray(values + (decl.axes[-1] in ("norm", "head_dim")), jnp.float32)

    return jax.tree_util.tree_map_with_path(one, declare(spec))


def disturb_routers(params: Any, share: float) -> Any:
    """Change each of the routers' weights by a normal random share of it."""
    rng = np.random.default_rng(1)

    def one(path: Any, array: jax.Array) -> jax.Array:
        if "router" not in jax.tree_util.keystr(path):
            return array
        return array * jnp.asarray(1 + share * rng.normal(size=array.shape), array.dtype)

    return jax.tree_util.tree_map_with_path(one, params)


def sample_answers(spec: ModelSpec, params: Any, answers: int, dtype: str) -> list[Completion]:
    """Sample answers to random prompts, with the experts of each token."""
    settings = EngineSettings(answers, PROMPT + ANSWER, dtype=dtype, record_routes=True)
    layout = Layout(make_mesh({}, jax.devices()[:1]))
    engine = NativeEngine(Decoder(spec), settings, layout=layout)
    sampling = SamplingParams(ANSWER)
    try:
        engine.load(params, version=0)
        return engine.sample([Request(prompt(i), sampling, seed=i) for i in range(answers)])
    finally:
        engine.close()


def prompt(number: int) -> tuple[int, ...]:
    """Return the tokens of a prompt."""
    return tuple(np.random.default_rng(number).integers(0, VOCAB, PROMPT).tolist())


def compare(
    spec: ModelSpec, params: Any, answers: list[Completion], *, replays: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return |engine's - trainer's log-prob| of every token, and whether its experts differ."""

    @jax.jit
    def run(params: Any, row: jax.Array, routes: jax.Array) -> tuple[jax.Array, jax.Array]:
        positions = jnp.arange(row.size)[None]
        segments, replayed = jnp.ones_like(positions), RowInputs(routes[None])
        decoder, rows = Decoder(spec), (row[None], positions, segments)
        hidden, router = decoder.hidden_states(params, *rows, inputs=replayed)
        after = jax.nn.log_softmax(decoder.logits(params, hidden[0, PROMPT - 1 : -1]))
        drawn = jnp.take_along_axis(after, row[PROMPT:, None], axis=1)[:, 0]
        return drawn, jnp.moveaxis(router["experts"][:, 0], 0, 1)

    off, others = [], []
    for number, answer in enumerate(answers):
        assert answer.routes is not None
        routes = np.pad(answer.routes, [(0, 1), (0, 0), (0, 0)], constant_values=-1)
        given = routes if replays else np.full_like(routes, -1)
        drawn, experts = run(params, jnp.array([*prompt(number), *answer.tokens]), given)
        off.append(np.abs(np.asarray(drawn) - answer.logprobs))
        same = (np.asarray(experts)[:-1, :, :, None] == answer.routes[:, :, None]).any(-1)
        others.append(~same[PROMPT - 1 :].all((1, 2)))
    return np.concatenate(off), np.concatenate(others)


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--answers", type=int, default=32)
    options = parser.parse_args(words)
    rows = []
    for experts, dtype, noise in (
        (EXPERTS, "float32", 1e-3),
        (EXPERTS, "float32", 1e-2),
        (EXPERTS, "bfloat16", 0.0),
        (TOP, "bfloat16", 0.0),
    ):
        spec = mixture_of(experts)
        params = draw_params(spec)
        answers = sample_answers(spec, disturb_routers(params, noise), options.answers, dtype)
        own, others = compare(spec, params, answers, replays=False)
        kinds = {"none": own}
        if experts > TOP:
            kinds["rollout"], _ = compare(spec, params, answers, replays=True)
        engine = f"{dtype}, routers off by {noise:g}" if noise else dtype
        for replay, off in kinds.items():
            parts = (
                f"{np.median(part):.2g}, {part.mean():.2g}, {part.max():.2g}" if part.size else "–"
                for part in (off[others], off[~others])
            )
            rows.append([engine, f"{TOP} of {experts}", replay, f"{others.mean():.1%}", *parts])
    print(describe_run("generation.router_replay", words))
    print(f"\n{options.answers} answers of {ANSWER} tokens\n")
    print("|difference of log-probs| in nats, median, mean and largest:\n")
    header = ["engine", "experts", "router_replay", "other experts", "of these tokens"]
    print(markdown_table([*header, "of the rest"], rows))


if __name__ == "__main__":
    main()
