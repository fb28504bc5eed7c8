"""Rotary positions: the frequencies of each published scaling, and the rotation itself."""

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

Frequencies: TypeAlias = np.ndarray  # [half] float32, in radians per position


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Divide every position by `factor` (Chen et al. 2023, https://arxiv.org/abs/2306.15595).

    >>> LinearScaling(factor=4.0).apply(np.ones(2, np.float32), theta=1e4)[0].tolist()
    [0.25, 0.25]
    """

    factor: float

    def apply(self, plain: Frequencies, *, theta: float) -> tuple[Frequencies, float]:
        """Return the scaled frequencies and what cosines and sines are multiplied by."""
        del theta
        return plain / np.float32(self.factor), 1.0


@dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """Leave positions below the spec's `max_positions` as they are; longer ones are not supported.

    Dynamic NTK scaling changes all frequencies with the length of the longest sequence of a batch,
    once that exceeds `max_positions`. Log-probs would then depend on what else is in the batch, and
    on when a key was cached. Up to `max_positions` it is the plain rotation, and that is what we
    compute. So the frequencies here are right only for sequences of at most `max_positions` tokens.

    >>> DynamicScaling(factor=4.0).apply(np.ones(2, np.float32), theta=1e4)[0].tolist()
    [1.0, 1.0]
    """

    factor: float

    def apply(self, plain: Frequencies, *, theta: float) -> tuple[Frequencies, float]:
        """Return the frequencies as they are, and 1."""
        del theta
        return plain, 1.0


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    r"""Divide the frequencies of long waves by `factor`, keep those of short ones, blend between.

    With $r = c f / 2\pi$ turns over the original context c, the share kept is
    $s = \mathrm{clip}((r - l) / (h - l), 0, 1)$ and the frequency
    $s f + (1 - s) f / \mathrm{factor}$ (Llama 3, https://arxiv.org/abs/2407.21783, and Meta's
    published code).

    Args:
        factor: How many times longer the context becomes.
        low_frequency_factor: Waves with fewer turns l over the original context are stretched.
        high_frequency_factor: Waves with more turns h are kept.
        original_positions: Context c of the model before it was stretched, in tokens.

    >>> scaling = Llama3Scaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0,
    ...                         original_positions=100)
    >>> scaling.apply(np.array([1.0, 0.001], np.float32), theta=1e4)[0].tolist()
    [1.0, 0.0001250000059371814]
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int

    def apply(self, plain: Frequencies, *, theta: float) -> tuple[Frequencies, float]:
        """Return the scaled frequencies, and 1."""
        del theta
        low, high = self.low_frequency_factor, self.high_frequency_factor
        turns = self.original_positions * plain.astype(np.float64) / (2 * math.pi)
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return (kept * plain + (1 - kept) * plain / self.factor).astype(np.float32), 1.0


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    r"""Stretch long waves, keep short ones, and sharpen attention (YaRN).

    Peng et al. 2023, eqs. 16-25 (https://arxiv.org/abs/2309.00071). Dimension i turns
    $r_i = c f_i / 2\pi$ times over the original context c; the ramp between `beta_fast` and
    `beta_slow` turns is linear in i, not in r as in the paper: so do the authors' code and the
    published models. Cosines and sines are multiplied by `attention_factor`,
    $0.1 \ln(\mathrm{factor}) + 1$ in the paper.

    Args:
        factor: How many times longer the context becomes.
        original_positions: Context c of the model before it was stretched, in tokens.
        attention_factor: What cosines and sines are multiplied by; None is that of the paper, or
            the ratio of the two `mscale`s if both are given.
        beta_fast: Turns above which a wave is kept.
        beta_slow: Turns below which a wave is stretched in full.
        mscale: Multiplies the logarithm of the paper's factor in the numerator (DeepSeek).
        mscale_all_dim: The same in the denominator.
        truncate: Whether the ends of the ramp are rounded outwards to whole dimensions.

    >>> scaling = YarnScaling(factor=4.0, original_positions=64)
    >>> frequencies, attention_factor = scaling.apply(np.ones(2, np.float32), theta=1e4)
    >>> round(attention_factor, 4)
    1.1386
    """

    factor: float
    original_positions: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def apply(self, plain: Frequencies, *, theta: float) -> tuple[Frequencies, float]:
        """Return the scaled frequencies and what cosines and sines are multiplied by."""
        width = 2 * len(plain)

        def dimension(turns: float) -> float:
            waves = self.original_positions / (turns * 2 * math.pi)
            return width * math.log(waves) / (2 * math.log(theta))

        first, last = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        last = last + 0.001 if first == last else last
        stretched = np.clip((np.arange(len(plain)) - first) / (last - first), 0.0, 1.0)
        scaled = stretched * plain / self.factor + (1 - stretched) * plain
        return scaled.astype(np.float32), self._attention_factor()

    def _attention_factor(self) -> float:
        def of(mscale: float) -> float:
            return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return of(self.mscale) / of(self.mscale_all_dim)
        return of(1.0)


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """Divide each frequency by a factor of its own, of two lists (LongRoPE).

    Ding et al. 2024 (https://arxiv.org/abs/2402.13753). The short factors serve sequences of the
    model's original context, the long ones longer sequences. transformers chooses by the longest
    sequence of each batch, so that log-probs depend on what else is in it, and on when a key was
    cached. Here, as in vLLM, all sequences of a run have the same factors; see
    `ModelSpec.for_length`.

    Args:
        short_factors: One for each frequency.
        long_factors: The same for long sequences.
        original_positions: Context of the model before it was stretched, in tokens.
        attention_factor: What cosines and sines are multiplied by, with either list.
        long: Whether the long factors are taken.

    >>> scaling = LongRopeScaling(short_factors=(1.0, 2.0), long_factors=(1.0, 8.0),
    ...                           original_positions=64, attention_factor=1.1)
    >>> frequencies, attention_factor = scaling.apply(np.ones(2, np.float32), theta=1e4)
    >>> frequencies.tolist(), attention_factor
    ([1.0, 0.5], 1.1)
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_positions: int
    attention_factor: float
    long: bool = False

    def apply(self, plain: Frequencies, *, theta: float) -> tuple[Frequencies, float]:
        """Return the scaled frequencies and what cosines and sines are multiplied by.

        Raises:
            ValueError: There is not one factor for each frequency.
        """
        del theta
        factors = self.long_factors if self.long else self.short_factors
        if len(factors) != len(plain):
            raise ValueError(
                f"LongRoPE has {len(factors)} factors, expected one for each of the {len(plain)} "
                "frequencies of a head"
            )
        return plain / np.array(factors, np.float32), self.attention_factor


Scaling: TypeAlias = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling


class Rotation(NamedTuple):
    """Cosines and sines of the rotary angles, one per position and pair of head dimensions."""

    cos: Float32[Array, "R L half"]
    sin: Float32[Array, "R L half"]


def turning_axes(sections: tuple[int, ...], *, interleaved: bool) -> np.ndarray:
    """Return by which of three positions each frequency turns: 0 time, 1 height, 2 width (M-RoPE).

    In chunks (Wang et al. 2024, https://arxiv.org/abs/2409.12191), the first frequencies turn by
    time, then others by height. Interleaved (Qwen3-VL, https://arxiv.org/abs/2511.21631), the three
    alternate for as long as height and width have some left, and the rest turns by time.

    Args:
        sections: How many frequencies turn by each.
        interleaved: Whether they alternate.

    >>> turning_axes((3, 1, 2), interleaved=False).tolist()
    [0, 0, 0, 1, 2, 2]
    >>> turning_axes((3, 1, 2), interleaved=True).tolist()
    [0, 1, 2, 0, 0, 2]
    """
    if not interleaved:
        return np.repeat(np.arange(3), sections)
    index = np.arange(sum(sections))
    axes = index % 3
    return np.where(index < 3 * np.array(sections)[axes], axes, 0)


def rotation(
    positions: Int[Array, "R L"] | Int[Array, "R L 3"],
    *,
    head_dim: int,
    theta: float,
    scaling: Scaling | None = None,
    axes: np.ndarray | None = None,
) -> Rotation:
    r"""Compute the rotary angles $p\,\theta^{-2i/H}$ for $i < H/2$ (https://arxiv.org/abs/2104.09864).

    Args:
        positions: Index of each token within its own sequence, or three numbers of each.
        head_dim: Dimensions H that are rotated, in pairs.
        theta: Base of the frequencies.
        scaling: What stretches the frequencies for long contexts.
        axes: By which of three numbers each frequency turns.

    Returns:
        Cosines and sines, with the scaling's attention factor in both.

    Raises:
        ValueError: There are three numbers of each token, and no axes.

    >>> rotation(jnp.array([[0, 5]]), head_dim=4, theta=1e4).cos.shape
    (1, 2, 2)
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = np.float32(1.0) / np.float32(theta) ** exponents
    frequencies, factor = scaling.apply(plain, theta=theta) if scaling else (plain, 1.0)
    if positions.ndim == 3 and axes is None:
        raise ValueError("tokens with three positions need mrope_sections, got none")
    turned_by = positions[..., None] if positions.ndim == 2 else positions[..., axes]
    angles = turned_by.astype(jnp.float32) * frequencies
    return Rotation(jnp.cos(angles) * factor, jnp.sin(angles) * factor)


def rotate(x: Float[Array, "R L N H"], by: Rotation) -> Float[Array, "R L N H"]:
    """Rotate pairs of dimensions of every head, in float32.

    Su et al. 2021, eq. 34 (https://arxiv.org/abs/2104.09864) pairs neighbours (2i, 2i + 1);
    published weights of these families pair the two halves (i, i + half). Where `by` has fewer
    than H/2 angles, the first dimensions are rotated and the others pass unchanged.

    >>> quarter = Rotation(jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1)))
    >>> rotate(jnp.array([[[[3.0, 5.0]]]]), quarter)[0, 0, 0].tolist()
    [-5.0, 3.0]
    >>> rotate(jnp.array([[[[3.0, 5.0, 7.0, 9.0]]]]), quarter)[0, 0, 0].tolist()
    [-5.0, 3.0, 7.0, 9.0]
    """
    half = by.cos.shape[-1]
    turned, kept = x[..., : 2 * half], x[..., 2 * half :]
    first, second = jnp.split(turned.astype(jnp.float32), 2, axis=-1)
    cos, sin = by.cos[:, :, None], by.sin[:, :, None]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([part.astype(x.dtype) for part in (*rotated, kept)], axis=-1)
