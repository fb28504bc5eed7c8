"""The training step alone: one update over a batch, with its rows packed and padded.

    python -m benchmarks.training.train_step                    the table, as Markdown
    python -m benchmarks.training.train_step --cases small-512-spread --repeats 5 --json FILE

A case is a model, the longest sequence and the spread of lengths: `equal`, all of them the longest,
`spread`, log-normal (sigma 1) with a mean of a quarter of the longest, or a number such as 0.55,
all of them that share of the longest. The update is that of `Learner`: GRPO's clipped loss on
policy, AdamW, one mini-batch of random tokens. Packed, it is as the library runs it. In short rows,
a row is as long as the longest sequence, in long ones much longer; what the library chooses of them
is not run again. Padded,
every sequence is filled up to the longest, as a row for itself; a micro-batch holds as many tokens
at most. The script fails where the losses and gradients are not the same. Seconds are the median of
the updates after the first, which compiles.

FLOPs are six for each matrix parameter and token, and 12·N·H for each token that another attends to
in a layer; padding is not counted, nor is what is computed twice. Over seconds and the machine's
rate that is the utilisation. The rate is `--peak` in TFLOP/s, or the best of matrix products of
three sizes in the dtype that the model computes in: float32 on a CPU, bfloat16 elsewhere.

Compare only on a machine that does nothing else.
"""

import datetime
import json
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.peers.rate import seconds as seconds_of
from benchmarks.tables import describe_machine, describe_run, markdown_head, markdown_row, parser_of
from benchmarks.training.grpo_tables import RATE_SHAPES
from benchmarks.training.workloads import MODELS, VOCABULARY, lognormal_lengths
from jaxrl_llm.algorithms.losses import ppo_clip
from jaxrl_llm.algorithms.reduce import token_mean
from jaxrl_llm.cli import take_huge_pages
from jaxrl_llm.compilation import BACKGROUND
from jaxrl_llm.data.packing import (
    RowShape,
    choose_rows,
    model_cost,
    padding,
    plan_microbatches,
    row_shape,
)
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.flops import update_flops
from jaxrl_llm.models.parameters import declare, init_params
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.sharding.layout import Layout, make_mesh, shardings
from jaxrl_llm.training import forward
from jaxrl_llm.training.forward import ForwardConfig
from jaxrl_llm.training.load_model import takes_long_rows
from jaxrl_llm.training.update import Learner, PolicyObjective
from jaxrl_llm.types import Batch

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # of gradients, relative to their norm


class Size(NamedTuple):
    """A model's shape as in `grpo_step` and vocabulary, a micro-batch's tokens, what is saved."""

    shape: Sequence[int]
    vocabulary: int
    tokens: int
    remat: str


SIZES = {
    "test": Size((16, 1, 2, 1, 8, 32), 32, 128, "none"),
    "tiny": Size(MODELS["tiny"], VOCABULARY, 8192, "none"),
    "small": Size(MODELS["small"], VOCABULARY, 4096, "none"),
    "1.7b": Size((2048, 28, 16, 8, 128, 6144), 151936, 32768, "full"),
}
CASES = [
    f"{size}-{longest}-{spread}"
    for size in ("tiny", "small")
    for longest in (128, 512)
    for spread in ("equal", "spread")
]


class Case(NamedTuple):
    """What is trained: a model, the lengths of the sequences, and how it computes."""

    name: str
    size: Size
    lengths: list[int]
    longest: int
    dtype: str

    @property
    def spec(self) -> ModelSpec:
        """Return the model."""
        width, layers, heads, kv_heads, head_dim, ff_width = self.size.shape
        return ModelSpec(
            vocab_size=self.size.vocabulary,
            hidden_size=width,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ff_width=ff_width,
            rope_theta=1e6,
            norm_eps=1e-6,
            tied_embeddings=True,
            qk_norm=True,
            max_positions=self.longest,
        )

    @property
    def forward(self) -> ForwardConfig:
        """Return how the model is run."""
        return ForwardConfig(model=Decoder(self.spec), dtype=self.dtype, remat=self.size.remat)

    def shape(self, *, long_rows: bool) -> RowShape:
        """Return the shape of micro-batches."""
        count = len(self.lengths)
        return row_shape(
            self.size.tokens,
            self.longest,
            sequences=count,
            cost=model_cost(self.spec),
            long_rows=long_rows,
        )


def case_of(name: str, sequences: int, dtype: str) -> Case:
    """Return a case by its name, with so many sequences.

    >>> case = case_of("tiny-512-spread", 64, "float32")
    >>> round(sum(case.lengths) / 64), max(case.lengths)
    (128, 512)
    >>> case_of("tiny-512-0.55", 3, "float32").lengths
    [282, 282, 282]
    """
    model, longest, spread = name.split("-")
    most = int(longest)
    lengths = [most] * sequences
    if spread == "spread":
        drawn = lognormal_lengths(sequences, most // 4, most)
        lengths = np.random.default_rng(0).permutation(drawn).tolist()
    elif spread != "equal":
        lengths = [round(float(spread) * most)] * sequences
    return Case(name, SIZES[model], lengths, most, dtype)


def batch_of(case: Case) -> Batch:
    """Return random tokens, an eighth of each sequence its prompt, with advantages."""
    rng, sizes = np.random.default_rng(0), np.array(case.lengths, np.int32)
    shape, place = (len(sizes), case.longest), np.arange(case.longest)
    answer = (place < sizes[:, None]) & (place >= np.maximum(1, sizes[:, None] // 8))
    advantages = np.broadcast_to(rng.normal(size=(len(sizes), 1)), shape).astype(np.float32)
    tokens = rng.integers(0, case.size.vocabulary, shape).astype(np.int32)
    return Batch(tokens, sizes, {"mask": answer, "advantages": advantages})


def padded(batch: Batch) -> Batch:
    """Return a batch whose sequences go on, without a loss, to the longest length."""
    return Batch(
        batch.tokens, np.full_like(batch.sequence_lengths, batch.tokens.shape[1]), batch.fields
    )


def learner_of(case: Case, shape: RowShape) -> Learner:
    """Return the update of a case on the first device; its optimizer keeps the gradient, too."""
    mesh = make_mesh({}, jax.devices()[:1])
    declared = declare(case.spec)
    like = jax.tree.map(
        lambda d, s: jax.ShapeDtypeStruct(d.shape, jnp.float32, sharding=s),
        declared,
        shardings(declared, mesh),
    )
    return Learner(
        PolicyObjective(loss=ppo_clip, on_policy=True),
        case.forward.over(shape),
        optax.chain(optax.trace(0.0), optax.adamw(1e-5)),
        reduce=token_mean,
        shape=shape,
        mesh=mesh,
        params_like=like,
    )


class Run(NamedTuple):
    """Seconds of each update after the first; loss and gradients of the first; share of padding."""

    seconds: list[float]
    loss: float
    gradients: list[np.ndarray]
    padding: float


def run(case: Case, batch: Batch, tokens: int, repeats: int, shape: RowShape) -> Run:
    """Update on a batch again and again.

    Args:
        case: what is trained.
        batch: as it is laid out, packed or padded.
        tokens: in it, without padding.
        repeats: updates after the first.
        shape: of micro-batches, which the update takes as it is.
    """
    if (batch.sequence_lengths == shape.length).all():
        shape = shape._replace(sequences=shape.rows)  # one in a row needs no more
    learner = learner_of(case, shape)
    params = jax.jit(init_params, static_argnums=0)(case.spec, key=jax.random.key(0))
    with mock.patch.object(forward, "choose_rows", lambda sizes, shape: shape):
        state, first = jax.device_get(learner.update(learner.init(params), batch, {}))
        gradients = [np.asarray(leaf) for leaf in jax.tree.leaves(state.opt_state[0].trace)]
        BACKGROUND.wait()  # programs of other shapes, which would be compiled meanwhile
        state, took = learner.init(params), []
        for _ in range(repeats):
            start = time.perf_counter()
            state, _ = jax.block_until_ready(learner.update(state, batch, {}))
            took.append(time.perf_counter() - start)
    filled = padding(
        batch.sequence_lengths, plan_microbatches(batch.sequence_lengths, shape), shape
    )
    share = 1 - (1 - filled) * tokens / int(batch.sequence_lengths.sum())
    return Run(took, float(first["loss"]), gradients, share)


def difference(one: Run, other: Run) -> float:
    """Return the norm of the difference of two gradients over that of one."""
    pairs = zip(one.gradients, other.gradients, strict=True)
    squares = [float(np.square(a - b, dtype=np.float64).sum()) for a, b in pairs]
    norm = sum(float(np.square(a, dtype=np.float64).sum()) for a in one.gradients)
    return (sum(squares) / norm) ** 0.5


def check(case: Case, packed: Run, filled: Run) -> float:
    """Return how much the gradients differ.

    Raises:
        SystemExit: they, or the losses, differ by more than the dtype explains.
    """
    gap, limit = difference(packed, filled), TOLERANCE[case.dtype]
    if not (gap < limit and abs(packed.loss - filled.loss) < limit):
        raise SystemExit(
            f"{case.name}: packed and padded gradients differ by {gap:.2g} of their norm, losses "
            f"{packed.loss:.8g} and {filled.loss:.8g}; expected less than {limit}"
        )
    return gap


def machine_rate(dtype: str) -> float:
    """Return the best rate of matrix products, in FLOP/s."""
    shapes = RATE_SHAPES if jax.default_backend() == "cpu" else [[8192, 8192, 8192]] * 3
    multiply, rates = jax.jit(jnp.matmul), []
    for m, k, n in shapes:
        one, other = (jnp.ones(shape, dtype) for shape in ((m, k), (k, n)))

        def once(one: Any = one, other: Any = other) -> None:
            multiply(one, other).block_until_ready()

        seconds_of(once, 3)
        times = max(1, int(0.3 / seconds_of(once, 3)))
        rates.append(2 * m * k * n / min(seconds_of(once, times) for _ in range(5)))
    return max(rates)


def measure(case: Case, repeats: int, rate: float) -> dict[str, Any]:
    """Return the figures of a case."""
    batch, tokens = batch_of(case), sum(case.lengths)
    layout = Layout(make_mesh({}, jax.devices()[:1]))
    may_be_long = takes_long_rows(case.forward, layout, case.longest)
    shape = case.shape(long_rows=may_be_long)
    chosen = choose_rows(batch.sequence_lengths, shape)
    packed = run(case, batch, tokens, repeats, chosen)
    others = [other for other in (shape, shape.in_short_rows) if other != chosen]
    other = run(case, batch, tokens, repeats, others[0]) if others else packed
    filled = run(case, padded(batch), tokens, repeats, shape.in_short_rows)
    middle = statistics.median(packed.seconds)
    check(case, packed, other)
    return {
        "case": case.name,
        "parameters": sum(gradient.size for gradient in packed.gradients),
        "sequences": len(case.lengths),
        "tokens": tokens,
        "rows": "short" if chosen.longest is None else "long",
        "packed_s": packed.seconds,
        "other_s": other.seconds,
        "padded_s": filled.seconds,
        "tokens_per_s": tokens / middle,
        "utilisation": update_flops(case.spec, case.lengths) / middle / rate,
        "padding_packed": packed.padding,
        "padding_other": other.padding,
        "padding_padded": filled.padding,
        "ratio_other": statistics.median(other.seconds) / middle,
        "ratio": statistics.median(filled.seconds) / middle,
        "difference": check(case, packed, filled),
    }


HEADS = [
    "case",
    "parameters",
    "sequences",
    "tokens",
    "rows chosen",
    "packed, s (least to most)",
    "in other rows, s",
    "padded, s",
    "tokens/s",
    "of the machine's rate",
    "padding",
    "in other rows",
    "if padded",
    "faster than other rows by",
    "than padded by",
    "gradients differ by",
]


def row(figures: dict[str, Any]) -> list[str]:
    """Return a case's line of the table."""

    def span(values: list[float]) -> str:
        return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"

    counts = [f"{figures[n]:,}" for n in ("parameters", "sequences", "tokens")]
    return [
        figures["case"],
        *counts,
        figures["rows"],
        span(figures["packed_s"]),
        span(figures["other_s"]),
        span(figures["padded_s"]),
        f"{figures['tokens_per_s']:,.0f}",
        f"{figures['utilisation']:.0%}",
        f"{figures['padding_packed']:.1%}",
        f"{figures['padding_other']:.1%}",
        f"{figures['padding_padded']:.1%}",
        f"{figures['ratio_other']:.2f}",
        f"{figures['ratio']:.2f}",
        f"{figures['difference']:.0e}",
    ]


def main(words: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--cases", nargs="+", default=CASES, help="model-longest-spread")
    parser.add_argument("--sequences", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3, help="updates that are timed")
    parser.add_argument("--dtype", choices=TOLERANCE, help="that the model computes in")
    parser.add_argument("--peak", type=float, help="the machine's TFLOP/s; by default measured")
    parser.add_argument("--json", type=Path, help="where to write the figures, too")
    options = parser.parse_args(words)
    if words is None:
        take_huge_pages()
    dtype = options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    rate = options.peak * 1e12 if options.peak else machine_rate(dtype)
    today = datetime.datetime.now(datetime.UTC).date()
    machine = f"{describe_machine()}, {jax.devices()[0].device_kind}"
    versions = f"Python {platform.python_version()}, jax {jax.__version__}"
    print(f"{describe_run('training.train_step', words)}, {versions}, {dtype}")
    print(f"\n{rate / 1e12:.3g} TFLOP/s {'given' if options.peak else 'measured'}\n")
    print(markdown_head(HEADS))
    lines = []
    for name in options.cases:
        lines.append(measure(case_of(name, options.sequences, dtype), options.repeats, rate))
        print(markdown_row(row(lines[-1])), flush=True)
    if options.json:
        figures = {"date": f"{today}", "machine": machine, "versions": versions, "rate": rate}
        options.json.write_text(json.dumps(figures | {"cases": lines}, indent=1))


if __name__ == "__main__":
    main()
