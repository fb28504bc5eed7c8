"""The embedded engine: sampling in the trainer's process, by the trainer's own model code.

Requests wait in a queue. A worker thread takes as many as there are slots, prefills each distinct
prompt once, copies its cache to all slots that share it, and decodes until every slot is done.

In a run of several processes each has this thread, and all of them must run the same waves: each
process calls `sample` with the same requests, and starts nothing else on the devices meanwhile.
"""

import asyncio
import functools
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.cache import Cache, by_layer, init_cache
from jaxrl_llm.models.spec import ModelSpec, compute_dtypes, declare
from jaxrl_llm.rollout.engine import EngineError
from jaxrl_llm.rollout.native.decode import Slots, decode, fill
from jaxrl_llm.sharding import processes
from jaxrl_llm.sharding.checksum import checksum
from jaxrl_llm.sharding.layout import Layout
from jaxrl_llm.sharding.mesh import BATCH, batch_shards, over_batch
from jaxrl_llm.sharding.reshard import moved_bytes, reshard
from jaxrl_llm.types import Completion, Receipt, Request

STOP_IDS = 8
"""The most stop tokens of a request."""

SHORTEST_PREFILL = 16
"""Prompts are padded to this many tokens or the next power of two."""

SHORTEST_READ = 128
"""Decoding reads a quarter of the cache's length, half of it or all, but no less than this."""


class NativeEngine:
    """An `Engine` in pure JAX. Slots are split over the batch axes of a mesh, weights by rules.

    Args:
        spec: the model.
        layout: how slots and weights are split; the axes `stage` and `context` have one device.
        slots: sequences decoded at once; a multiple of the parts of a batch.
        max_tokens: the longest sequence, prompt and answer.
        max_prompt_tokens: the longest prompt.
        prompts_per_fill: distinct prompts prefilled at once; rounded up to such a multiple.
        dtype: of weights, cache and computation.
        steps: tokens decoded between two looks at what is done.

    Raises:
        ValueError: slots that the devices can't share evenly, or a mesh with stages or contexts.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        layout: Layout,
        slots: int,
        max_tokens: int,
        max_prompt_tokens: int,
        prompts_per_fill: int,
        dtype: str = "float32",
        steps: int = 32,
    ) -> None:
        """Compile nothing yet; the first `load` does."""
        idle = [axis for axis in ("stage", "context") if layout.mesh.shape[axis] > 1]
        if idle:
            raise ValueError(f"nothing is decoded over the axis {idle[0]!r}; wanted a size of 1")
        parts = batch_shards(layout.mesh)
        if slots % parts:
            raise ValueError(
                f"rollout.slots={slots} can't be shared evenly by the {parts} parts of a batch; "
                f"wanted a multiple of {parts}"
            )
        self.spec, self.slots, self.dtype = spec, slots, jnp.dtype(dtype)
        self._dtypes = compute_dtypes(spec, self.dtype)
        self.max_tokens, self.max_prompt_tokens = max_tokens, max_prompt_tokens
        self._steps = steps
        self.prompts_per_fill = math.ceil(prompts_per_fill / parts) * parts
        self._params_layout = layout.of(declare(spec))
        self._layers_layout = self._params_layout | {
            stack: {
                name: (layout.sharding(*home.spec[1:]),) * len(numbers)
                for name, home in self._params_layout[stack].items()
            }
            for stack, numbers in spec.stacks.items()
        }
        self._split = {
            stack: {
                name: jax.jit(_unstack, out_shardings=homes)
                for name, homes in self._layers_layout[stack].items()
            }
            for stack in spec.stacks
        }
        run_as = spec.for_decoding
        self._by_slot = over_batch(layout.mesh)
        heads = "tensor" if run_as.kv_heads % layout.mesh.shape["tensor"] == 0 else None
        by_row: Any = (layout.sharding(BATCH, heads),) * spec.layers
        self._cache_layout = Cache(by_row, by_row)
        self._fill = jax.jit(
            functools.partial(_fill, run_as, layout),
            donate_argnums=1,
            out_shardings=self._cache_layout,
        )
        self._decode = jax.jit(
            functools.partial(_decode, run_as, layout, steps),
            static_argnums=0,
            donate_argnums=(2, 3),
            out_shardings=(self._cache_layout, self._by_slot),
        )
        make: Callable[[], Cache] = functools.partial(
            init_cache, run_as, slots, max_tokens, dtype=self.dtype
        )
        self._make_cache = jax.jit(make, out_shardings=self._cache_layout)
        self._params: Any = None
        self._version = -1
        self._cache: Cache | None = None
        self._queue: deque[tuple[Request, Future[Completion]]] = deque()
        self._state = threading.Condition()
        self._device = threading.Lock()  # held while weights or cache are in use
        self._paused = self._closed = False
        self._worker = threading.Thread(target=self._work, daemon=True, name="native-engine")
        self._worker.start()

    async def generate(self, request: Request) -> Completion:
        """Sample one answer."""
        return await asyncio.wrap_future(self._submit([request])[0])

    def sample(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one answer for each request, in order; equal prompts are prefilled once."""
        return [future.result() for future in self._submit(requests)]

    def load(self, params: Any, version: int) -> Receipt:
        """Copy weights into the engine's layout and dtype; waits for the wave in flight."""
        with self._device:
            first = self._params is None
            self._params = None  # free the old copy before the new one is made
            moved = moved_bytes(params, self._params_layout, dtype=self._dtypes)
            whole = reshard(params, self._params_layout, dtype=self._dtypes)
            self._params = self._take_apart(whole)
            del whole
            self._version = version
            receipt = Receipt(version, int(jax.jit(checksum)(self._params)), moved)
            if first:
                self._warm_up()
        return receipt

    def shapes(self) -> tuple[Any, Cache]:
        """Return weights and cache as shapes in their layouts; nothing is allocated."""
        stacked = jax.tree.map(
            lambda d, dtype: jax.ShapeDtypeStruct(d.shape, dtype), declare(self.spec), self._dtypes
        )
        weights = jax.eval_shape(functools.partial(by_layer, spec=self.spec), stacked)
        cache = jax.eval_shape(self._make_cache)
        return _placed((weights, cache), (self._layers_layout, self._cache_layout))

    def lower(self) -> dict[str, Any]:
        """Lower `fill`, of the longest prompts, and `decode` for shapes alone."""
        width = self._prefill_width(self.max_prompt_tokens)
        prompts = jax.ShapeDtypeStruct((self.prompts_per_fill, width), jnp.int32)
        lengths = jax.ShapeDtypeStruct((self.prompts_per_fill,), jnp.int32)
        slots = _start([], self.slots, self.max_tokens)
        inputs = (prompts, lengths, slots.tokens, slots)
        inputs = _placed(inputs, jax.tree.map(lambda _: self._by_slot, inputs))
        fill = self._fill.lower(*self.shapes(), *inputs[:3])
        decode = self._decode.lower(self.max_tokens, *self.shapes(), inputs[3])
        return {"fill": fill, "decode": decode}

    def pause(self) -> None:
        """Start no new wave until `resume`; the one in flight ends."""
        with self._state:
            self._paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        with self._state:
            self._paused = False
            self._state.notify_all()

    def sleep(self) -> None:
        """Pause, and free the cache once the wave in flight has ended."""
        self.pause()
        with self._device:
            self._cache = None

    def wake(self) -> None:
        """Resume; the next wave allocates the cache."""
        self.resume()

    def close(self) -> None:
        """Stop the worker; requests that wait fail with EngineError."""
        with self._state:
            self._closed = True
            waiting, self._queue = self._queue, deque()
            self._state.notify_all()
        for _, future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineError("the engine was closed"))
        if threading.current_thread() is not self._worker:
            self._worker.join()

    def _submit(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        for request in requests:
            self._check(request)
        entries = [(request, Future()) for request in requests]
        with self._state:
            if self._closed:
                raise EngineError("the engine is closed")
            if self._params is None and self._version < 0:
                raise EngineError("the engine has no weights: call load first")
            self._queue.extend(entries)
            self._state.notify_all()
        return [future for _, future in entries]

    def _check(self, request: Request) -> None:
        prompt, sampling = request.prompt, request.sampling
        longest = min(self.max_prompt_tokens, self.max_tokens - sampling.max_new_tokens)
        if not 0 < len(prompt) <= longest or sampling.max_new_tokens < 1:
            raise EngineError(
                f"a prompt of {len(prompt)} tokens with max_new_tokens={sampling.max_new_tokens} "
                f"does not fit: the engine holds prompts of 1 to {self.max_prompt_tokens} tokens "
                f"and {self.max_tokens} tokens in all"
            )
        if not 0 <= min(prompt) <= max(prompt) < self.spec.vocab_size:
            raise EngineError(
                f"prompt holds token id {min(prompt) if min(prompt) < 0 else max(prompt)}, "
                f"wanted 0 to {self.spec.vocab_size - 1}"
            )
        if not 0 <= request.seed < 2**32:
            raise EngineError(f"got seed {request.seed}, wanted 0 to {2**32 - 1}")
        if len(sampling.stop_ids) > STOP_IDS:
            raise EngineError(f"got {len(sampling.stop_ids)} stop ids, at most {STOP_IDS} are held")

    def _work(self) -> None:
        while self._wait_for_requests():
            with self._device:
                wave = self._next_wave()
                try:
                    answers = self._run([request for request, _ in wave]) if wave else []
                except Exception as error:  # it reaches whoever waits for an answer
                    answers = [error] * len(wave)
            for (_, future), answer in zip(wave, answers, strict=True):
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)

    def _wait_for_requests(self) -> bool:
        """Block until there is something to do; False when the engine was closed."""
        with self._state:
            self._state.wait_for(lambda: self._closed or (self._queue and not self._paused))
            return not self._closed

    def _next_wave(self) -> list[tuple[Request, Future[Completion]]]:
        """Take as many requests as there are slots; none if a pause came first."""
        wave: list[tuple[Request, Future[Completion]]] = []
        with self._state:
            while self._queue and len(wave) < self.slots and not self._paused:
                entry = self._queue.popleft()
                if entry[1].set_running_or_notify_cancel():  # else its caller gave up
                    wave.append(entry)
        return wave

    def _run(self, wave: Sequence[Request]) -> list[Completion]:
        cache = self._take_cache()
        prompts = list(dict.fromkeys(request.prompt for request in wave))
        width = self._prefill_width(max(map(len, prompts)))
        number = {prompt: i for i, prompt in enumerate(prompts)}
        source = np.full(self.slots, -1, np.int32)
        source[: len(wave)] = [number[request.prompt] for request in wave]
        for first in range(0, len(prompts), self.prompts_per_fill):
            group = prompts[first : first + self.prompts_per_fill]
            inside = (source >= first) & (source < first + len(group))
            cache = self._fill(
                self._params,
                cache,
                *self._prompt_arrays(group, width),
                processes.put(np.where(inside, source - first, -1), self._by_slot),
            )
        slots = processes.put(_start(wave, self.slots, self.max_tokens), self._by_slot)
        last = max(len(request.prompt) for request in wave) - 1
        while True:
            last = min(last + self._steps, self.max_tokens)
            cache, slots = self._decode(self._read_width(last), self._params, cache, slots)
            if np.all(processes.fetch(slots.done)):
                break
        self._cache = cache
        return self._read(wave, processes.fetch(slots))

    def _read(self, wave: Sequence[Request], slots: Slots) -> list[Completion]:
        answers = []
        for i, request in enumerate(wave):
            n = int(slots.generated[i])
            tokens = np.asarray(slots.answers[i, :n])
            stopped = int(tokens[-1]) in request.sampling.stop_ids
            finish = "stop" if stopped else "length"
            logprobs = np.asarray(slots.logprobs[i, :n])
            answers.append(Completion(tokens, logprobs, finish, self._version))
        return answers

    def _take_cache(self) -> Cache:
        """Return the cache, to be donated; allocate it after a start, a sleep or a failure."""
        cache, self._cache = self._cache, None
        return self._make_cache() if cache is None else cache

    def _take_apart(self, params: Any) -> Any:
        """Give each layer arrays of its own, one stacked array after another."""
        params = {name: dict(p) if name in self.spec.stacks else p for name, p in params.items()}
        for stack, split in self._split.items():
            for name in split:
                params[stack][name] = split[name](params[stack][name])
        return params

    def _prefill_width(self, length: int) -> int:
        return min(_power(length, SHORTEST_PREFILL), self.max_tokens)

    def _read_width(self, length: int) -> int:
        shares = (max(SHORTEST_READ, math.ceil(self.max_tokens / n)) for n in (4, 2))
        return min([*(s for s in shares if length <= s), self.max_tokens])

    def _prompt_arrays(self, prompts: Sequence[Sequence[int]], width: int) -> Any:
        tokens = np.zeros((self.prompts_per_fill, width), np.int32)
        lengths = np.ones(self.prompts_per_fill, np.int32)
        for i, prompt in enumerate(prompts):
            tokens[i, : len(prompt)] = prompt
            lengths[i] = len(prompt)
        return processes.put((tokens, lengths), self._by_slot)

    def _warm_up(self) -> None:
        """Compile every shape now, so that nothing compiles in the middle of a run."""
        cache = self._take_cache()
        nowhere = processes.put(np.full(self.slots, -1, np.int32), self._by_slot)
        widths = {self._prefill_width(n) for n in range(1, self.max_prompt_tokens + 1)}
        for width in sorted(widths):
            cache = self._fill(self._params, cache, *self._prompt_arrays([], width), nowhere)
        for width in sorted({self._read_width(n) for n in range(1, self.max_tokens + 1)}):
            slots = processes.put(_start([], self.slots, self.max_tokens), self._by_slot)
            cache, _ = self._decode(width, self._params, cache, slots)
        self._cache = cache


def _unstack(stacked: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(stacked)


def _power(length: int, least: int) -> int:
    """Return the first of the least, its double, … that is no less than a length."""
    return least << max(0, math.ceil(math.log2(length / least)))


def _placed(tree: Any, layout: Any) -> Any:
    """Return arrays as shapes in a layout."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, layout
    )


def _fill(spec: ModelSpec, layout: Layout, params: Any, cache: Cache, *prompts: jax.Array) -> Cache:
    return fill(params, spec, cache, *prompts, layout=layout)


def _decode(
    spec: ModelSpec, layout: Layout, steps: int, live: int, params: Any, cache: Cache, slots: Slots
) -> tuple[Cache, Slots]:
    return decode(params, spec, cache, slots, steps=steps, live=live, layout=layout)


def _start(wave: Sequence[Request], slots: int, max_tokens: int) -> Slots:
    """Return the state of a wave before its first step; slots past the wave are done."""
    empty = slots - len(wave)

    def column(values: Sequence[Any], default: Any, dtype: Any) -> np.ndarray:
        return np.array([*values, *[default] * empty], dtype)

    how = [request.sampling for request in wave]
    stops = [[*s.stop_ids, *[-1] * (STOP_IDS - len(s.stop_ids))] for s in how]
    columns: dict[str, Any] = dict(  # on the host; `put` makes them arrays
        tokens=column([r.prompt[-1] for r in wave], 0, np.int32),
        positions=column([len(r.prompt) - 1 for r in wave], 0, np.int32),
        generated=np.zeros(slots, np.int32),
        done=np.arange(slots) >= len(wave),
        answers=np.zeros((slots, max_tokens), np.int32),
        logprobs=np.zeros((slots, max_tokens), np.float32),
        limits=column([s.max_new_tokens for s in how], 0, np.int32),
        seeds=column([r.seed for r in wave], 0, np.uint32),
        temperature=column([s.temperature for s in how], 1.0, np.float32),
        top_p=column([s.top_p for s in how], 1.0, np.float32),
        top_k=column([s.top_k for s in how], 0, np.int32),
        stop_ids=column(stops, [-1] * STOP_IDS, np.int32),
    )
    return Slots(**columns)
