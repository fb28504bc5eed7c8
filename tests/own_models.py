"""Models as users write them: flax modules with a cache and without, and a pair of functions."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_llm.models.attention import attend_cache, segment_mask
from jaxrl_llm.models.cache import Cache, write_slots
from jaxrl_llm.models.functional import FunctionalModel

WIDTH, HEADS, LONGEST = 32, 4, 64


def normal(*axes):
    """Draw a parameter with these logical axes."""
    return nnx.with_partitioning(nnx.initializers.normal(0.3), axes)


class Block(nnx.Module):
    """Attention and a feed-forward, with logical axes of its own."""

    def __init__(self, rngs):
        split = {"use_bias": False, "rngs": rngs}
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, kernel_init=normal("embed", "mine"), **split)
        self.out = nnx.Linear(WIDTH, WIDTH, kernel_init=normal("mine", "embed"), **split)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, kernel_init=normal("embed", "ff"), rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, kernel_init=normal("ff", "embed"), rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, attend):
        qkv = jnp.split(self.qkv(self.norms[0](x)), 3, axis=-1)
        q, k, v = (part.reshape(*x.shape[:2], HEADS, -1) for part in qkv)
        x = x + self.dropout(self.out(attend(q, k, v).reshape(x.shape)))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Plain(nnx.Module):
    """A module without a cache, whose call returns logits."""

    max_positions = LONGEST

    def __init__(self, vocab_size, *, layers: int = 2, rngs):
        embedding = {"embedding_init": normal("vocab", "embed"), "rngs": rngs}
        self.tokens = nnx.Embed(vocab_size, WIDTH, **embedding)
        self.positions = nnx.Embed(LONGEST, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.scale = nnx.Variable(np.float32(0.5))

    def run(self, tokens, positions, attending):
        x = self.tokens(tokens) + self.positions(positions)
        for number, block in enumerate(self.blocks):
            x = block(x, attending(number))
        return self.tokens.attend(self.norm(x)) * self.scale

    def __call__(self, tokens, positions, segment_ids):
        mask = segment_mask(segment_ids)

        def attend(q, k, v):
            return nnx.dot_product_attention(q, k, v, mask=mask)

        return self.run(tokens, positions, lambda number: attend)


class Cached(Plain):
    """The same module with a cache."""

    def init_cache(self, rows, slots, dtype):
        keys = jnp.zeros((rows, HEADS, WIDTH // HEADS, slots), dtype)
        layers = len(self.blocks)
        return Cache((keys,) * layers, (keys.swapaxes(2, 3),) * layers)

    def extend(self, cache, tokens, positions):
        def attending(number):
            def attend(q, k, v):
                nonlocal cache
                cache = write_slots(cache, number, k, v, positions)
                return attend_cache(q, cache.keys[number], cache.values[number], positions)

            return attend

        return self.run(tokens, positions, attending), cache


class WithHead(nnx.Module):
    """A stack of layers under `nnx.scan`, whose call returns hidden states."""

    def __init__(self, vocab_size, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: "layers"})
        def blocks(rngs):
            return Block(rngs)

        self.tokens = nnx.Embed(vocab_size, WIDTH, rngs=rngs)
        self.blocks = blocks(rngs)
        self.head = nnx.Param(nnx.initializers.normal(0.3)(rngs(), (WIDTH, vocab_size)))

    def __call__(self, tokens, positions, segment_ids):
        mask = segment_mask(segment_ids)

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def layers(x, block):
            return block(x, lambda q, k, v: nnx.dot_product_attention(q, k, v, mask=mask))

        return layers(self.tokens(tokens), self.blocks)

    def head_matrix(self):
        return self.head[...]


def bigram(vocab_size, *, std: float = 0.1):
    """A pair of pure functions: a token's logits follow from the token before it alone."""

    def init(key):
        return {"table": std * jax.random.normal(key, (vocab_size, vocab_size))}

    def apply(params, tokens, positions, segment_ids):
        return params["table"][tokens]

    return FunctionalModel(init=init, apply=apply, axes={"table": (None, "vocab")})


def nothing(vocab_size):
    return vocab_size
