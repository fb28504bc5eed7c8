"""An engine whose parts are on nodes of their own: each an `EngineHost`, with the whole model."""

import asyncio
import contextlib
import functools
import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import ray
from jax.sharding import Sharding
from ray.exceptions import RayError, RayTaskError

from jaxrl_llm.models.parameters import compute_dtypes, declare
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.monitoring.job_context import JobContext
from jaxrl_llm.rollout.engine import (
    Completion,
    Engine,
    EngineError,
    Listener,
    Receipt,
    Request,
    Router,
    Stop,
    check_needed,
    check_request,
)
from jaxrl_llm.sharding import distributed
from jaxrl_llm.sharding.reshard import group_by_bytes

BUCKET_BYTES = 2**28

Bounds = tuple[tuple[int, int], ...]
"""First index and end along each axis."""


# Weights on their way from training processes to engines in others, by Ray's object store.
#
# Each training process publishes what of each array lies on its devices, in the engine's dtype;
# of copies one, and those that have copies take turns. An engine takes what its devices need. So
# the host of a process holds its own part of the model and a bucket of arrays, never all of it,
# unless a device holds all.


Piece = tuple[Bounds, np.ndarray]
"""A box of an array, and its values."""


class TransferPlan(NamedTuple):
    """The arrays of a model as engines take them.

    Attributes:
        shapes: of the arrays, in the order of their tree.
        dtypes: of the same.
        buckets: numbers of the arrays that travel together.
    """

    shapes: list[tuple[int, ...]]
    dtypes: list[np.dtype]
    buckets: list[list[int]]


def plan_transfer(spec: ModelSpec, dtype: str) -> TransferPlan:
    """Cut the arrays of a model into buckets.

    Args:
        spec: the model, without an adapter.
        dtype: of the engine.
    """
    shapes = [tuple(array.shape) for array in jax.tree.leaves(declare(spec))]
    kinds = [np.dtype(kind) for kind in jax.tree.leaves(compute_dtypes(spec, dtype))]
    sizes = [math.prod(s) * k.itemsize for s, k in zip(shapes, kinds, strict=True)]
    return TransferPlan(shapes, kinds, list(group_by_bytes(sizes, BUCKET_BYTES)))


def own_pieces(array: jax.Array, dtype: np.dtype, turn: int = 0) -> list[Piece]:
    """Return what of an array this process has to publish: of each box one copy in all.

    Args:
        array: on devices of all processes.
        dtype: to publish.
        turn: as in `own_shards`.

    >>> own_pieces(jax.numpy.ones(2), np.dtype("float16"))
    [(((0, 2),), array([1., 1.], dtype=float16))]
    """
    return [
        # a copy, as an array keeps for ever what of it was on the host
        (bounds_of(shard.index, array.shape), np.asarray(jnp.array(shard.data, dtype)))
        for shard in own_shards(array, turn)
    ]


def own_shards(array: jax.Array, turn: int) -> list[Any]:
    """Choose among the copies of each box of an array; return those chosen that are here.

    Args:
        array: on devices of all processes.
        turn: the number of the first box's copy, among so many as there are; each next box's is
            the next one.
    """
    indices = array.sharding.devices_indices_map(array.shape)
    boxes = list(dict.fromkeys(bounds_of(index, array.shape) for index in indices.values()))
    numbers, copies = {box: i for i, box in enumerate(boxes)}, len(indices) // len(boxes)
    return [
        shard
        for shard in array.addressable_shards
        if shard.replica_id == (turn + numbers[bounds_of(shard.index, array.shape)]) % copies
    ]


def bounds_of(index: Any, shape: Sequence[int]) -> Bounds:
    """Return a shard's index as bounds.

    >>> bounds_of((slice(None), slice(2, 4)), (3, 8))
    ((0, 3), (2, 4))
    """
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def assemble(pieces: Sequence[Piece], bounds: Bounds, dtype: np.dtype, name: str) -> np.ndarray:
    """Put a box of an array together.

    Args:
        pieces: of the array, disjoint.
        bounds: of the box.
        dtype: of the array.
        name: of the array, for the error.

    Raises:
        EngineError: the pieces don't cover the box, or have another dtype.
    """
    for own, values in pieces:
        if own == bounds and values.dtype == dtype:
            return values
    box, filled = np.empty([end - first for first, end in bounds], dtype), 0
    for own, values in pieces:
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(bounds, own, strict=True)]
        if values.dtype != dtype or any(first >= end for first, end in common):
            continue
        into = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, bounds, strict=True))
        of = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(common, own, strict=True))
        box[into] = values[of]
        filled += math.prod(end - first for first, end in common)
    if filled != box.size:
        raise EngineError(
            f"weights {name}, {list(bounds)}: expected {box.size} numbers of dtype {dtype}, "
            f"got {filled}"
        )
    return box


def publish(
    coordinator: Any, params: Any, plan: TransferPlan, *, sync: int, process: int
) -> list[Any]:
    """Put this process's parts of the weights into its node's object store, for engines to take.

    Args:
        coordinator: handle of the job's `Coordinator`.
        params: the weights, nested as `declare(spec)`.
        plan: the plan of their model.
        sync: number of this weight sync.
        process: index of this process.

    Returns:
        References that must be kept as long as an engine may need these weights.
    """
    import ray

    leaves, references = jax.tree.leaves(params), []
    for number, bucket in enumerate(plan.buckets):
        parts = {i: own_pieces(leaves[i], plan.dtypes[i], turn=i) for i in bucket}
        references.append(ray.put(parts))
        ray.get(coordinator.publish.remote(sync, number, process, references[-1:]))
    return references


def collect(
    coordinator: Any, plan: TransferPlan, shardings: Any, *, sync: int, like: Any
) -> tuple[Any, int]:
    """Take the weights of a sync, as they are published.

    Args:
        coordinator: handle of the job's `Coordinator`.
        plan: the plan of their model.
        shardings: of the arrays on this process's devices, nested as `like`; None leaves them on
            the host, whole.
        sync: number of the weight sync.
        like: a tree with an item for each array.

    Returns:
        The arrays, and how many bytes came.

    Raises:
        EngineError: a part did not come.
    """
    structure = jax.tree.structure(like)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(like)]
    homes = [None] * len(plan.shapes) if shardings is None else structure.flatten_up_to(shardings)
    arrays: list[Any] = [None] * len(plan.shapes)
    total = 0
    for number, bucket in enumerate(plan.buckets):
        references = coordinator.get_parts.remote(sync, number).future().result()
        coming = [reference.future() for reference in references]  # all at once
        published = [future.result() for future in coming]
        for i in bucket:
            pieces = [piece for parts in published for piece in parts[i]]
            total += sum(values.nbytes for _, values in pieces)
            arrays[i] = _place(pieces, plan.shapes[i], plan.dtypes[i], homes[i], names[i])
    return jax.tree.unflatten(structure, arrays), total


def _place(
    pieces: Sequence[Piece],
    shape: tuple[int, ...],
    dtype: np.dtype,
    home: Sharding | None,
    name: str,
) -> Any:
    @functools.cache  # of copies on several devices
    def box(bounds: Bounds) -> np.ndarray:
        return assemble(pieces, bounds, dtype, name)

    if home is None:
        return box(tuple((0, size) for size in shape))
    return jax.make_array_from_callback(shape, home, lambda index: box(bounds_of(index, shape)))


T = TypeVar("T")

POLL_S, STOP_S = 0.02, 5.0
"""Seconds between two looks at whether to stop, and until hosts are told so once more."""


class RemoteEngine(Engine):
    """An `Engine` of one or more `EngineHost`s, which sample for all training processes.

    All of these call `load` and `sample`, in the same order; the first one talks to the hosts and
    tells the others what came of it. Which host answers a request depends on nothing but the
    requests that are sampled with it. A host that is lost is replaced by Ray; the new one takes the
    weights that were published last, and all of the requests again that the lost one was at.

    Args:
        job: this process's place in it.
        spec: the model, without an adapter.
        dtype: of the engines.
        max_tokens: the longest sequence, prompt and answer.
    """

    def __init__(self, job: JobContext, spec: ModelSpec, *, dtype: str, max_tokens: int) -> None:
        """Hold no weights."""
        self.spec, self.max_tokens = spec, max_tokens
        self._job = job
        self._plan = plan_transfer(spec, dtype)
        self._router = Router(len(job.engine_hosts))
        self._sync_numbers, self._object_keys = itertools.count(), itertools.count()
        self._samplings = itertools.count()
        self._loaded: tuple[int, int] | None = None  # number of the weight sync, and version
        self._references: list[Any] = []

    def load(self, params: Any, version: int) -> Receipt:
        """Publish weights, and wait until all hosts have them.

        Args:
            params: the weights, nested as `declare(spec)`.
            version: of the weights.

        Raises:
            EngineError: a host does not take them or is lost too often, or hosts hold different
                weights.
        """
        sync = next(self._sync_numbers)
        self._loaded, self._references, tasks = None, [], []
        if distributed.is_first():
            tasks = [host.load.remote(sync, version) for host in self._job.engine_hosts]
        published = publish(
            self._job.coordinator, params, self._plan, sync=sync, process=self._job.process_index
        )
        receipts: list[Receipt] = distributed.run_on_first(lambda: get_results(tasks))
        if len({receipt[:2] for receipt in receipts}) > 1:
            raise EngineError(f"engines hold different weights after one sync: {receipts}")
        self._references, self._loaded = published, (sync, version)
        return receipts[0]._replace(moved_bytes=sum(r.moved_bytes for r in receipts))

    def sample(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one answer for each request, in order."""
        for request in requests:
            self._check(request)
        weights = self._require_weights()
        return self._on_first_process(lambda: self._sample(requests, weights))

    def sample_until(
        self,
        requests: Sequence[Request],
        needed: int,
        stop: Stop | None = None,
        listener: Listener | None = None,
    ) -> list[Completion]:
        """Sample until the first requests have their answers, or `stop` is set, which counts none.

        How far the other answers have come then is left to chance. The listener is not called.
        """
        del listener  # answers come when all hosts have stopped
        check_needed(needed, len(requests))
        for request in requests:
            self._check(request)
        weights = self._require_weights()
        return self._on_first_process(lambda: self._sample_until(requests, needed, stop, weights))

    async def generate(self, request: Request) -> Completion:
        """Sample one answer; only where one process trains. Cancelling does not reach the host."""
        if distributed.process_count() > 1:
            raise EngineError("only `sample` can be called where several processes train")
        self._check(request)
        weights = self._require_weights()
        host = self._router.choose(request.prompt, _max_tokens(request))
        try:
            task = self._job.engine_hosts[host].generate.remote(request, *weights)
            with engine_errors():
                return await asyncio.wrap_future(task.future())
        finally:
            self._router.done(host, _max_tokens(request), request.prompt)

    async def stream(self, request: Request) -> AsyncIterator[Completion]:
        """Yield one answer, in one piece."""
        yield await self.generate(request)

    def pause(self) -> None:
        """Start nothing new."""
        self._call_all("pause")

    def resume(self) -> None:
        """Go on."""
        self._call_all("resume")

    def sleep(self) -> None:
        """Pause, and free the caches."""
        self._call_all("sleep")

    def wake(self) -> None:
        """Go on after `sleep`."""
        self._call_all("wake")

    def close(self) -> None:
        """Forget the weights; the launcher ends the hosts."""
        self._references = []

    def _call_all(self, method: str) -> None:
        if distributed.is_first():
            get_results([host.call.remote(method) for host in self._job.engine_hosts])

    def _on_first_process(self, make: Callable[[], T]) -> T:
        """Call a function in the first process; the others get its result by the object stores."""
        if distributed.process_count() == 1:
            return make()
        key, made, coordinator = next(self._object_keys), [], self._job.coordinator

        def put() -> None:
            made.append(make())
            ray.get(coordinator.put.remote(key, [ray.put(made[0])]))

        distributed.run_on_first(put)  # what is large does not go through jax's service
        return made[0] if made else ray.get(ray.get(coordinator.get.remote(key)))

    def _sample(self, requests: Sequence[Request], weights: tuple[int, int]) -> list[Completion]:
        shares = self._share(requests)
        tasks = [
            host.sample.remote([requests[i] for i in share], *weights) for host, share in shares
        ]
        return in_order(shares, get_results(tasks))

    def _sample_until(
        self, requests: Sequence[Request], needed: int, stop: Stop | None, weights: tuple[int, int]
    ) -> list[Completion]:
        number, shares = next(self._samplings), self._share(requests)
        tasks = [
            host.sample_until.remote(
                number, [requests[i] for i in share], sum(i < needed for i in share), *weights
            )
            for host, share in shares
        ]
        waiting = [host.first_whole.remote(number) for host, _ in shares]
        while waiting and not (stop is not None and stop.is_set):
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=POLL_S)
        left = tasks
        while left:  # one that was lost meanwhile has to be told again
            for host, _ in shares:
                host.stop.remote(number)
            _, left = ray.wait(left, num_returns=len(left), timeout=STOP_S)
        return in_order(shares, get_results(tasks))

    def _share(self, requests: Sequence[Request]) -> list[tuple[Any, list[int]]]:
        """Return each host that has something to do, with the numbers of its requests."""
        hosts = self._job.engine_hosts
        router = Router(len(hosts))  # caches are empty after a weight sync, in a new job, too
        chosen = [router.choose(r.prompt, _max_tokens(r)) for r in requests]
        shares = [[i for i, c in enumerate(chosen) if c == host] for host in range(len(hosts))]
        return [(host, share) for host, share in zip(hosts, shares, strict=True) if share]

    def _require_weights(self) -> tuple[int, int]:
        if self._loaded is None:
            raise EngineError("the engine has no weights: call load first")
        return self._loaded

    def _check(self, request: Request) -> None:
        """Refuse what no engine can serve, before anything is sent; hosts may refuse more."""
        size = self.spec.vocab_size
        check_request(
            request, max_tokens=self.max_tokens, vocab_size=size, limits={"top_logprobs": size}
        )


def in_order(
    shares: Sequence[tuple[Any, list[int]]], answers: Sequence[list[Completion]]
) -> list[Completion]:
    """Return the answers of all hosts in the order of the requests."""
    completions = {
        number: answer
        for (_, share), own in zip(shares, answers, strict=True)
        for number, answer in zip(share, own, strict=True)
    }
    return [completions[number] for number in range(len(completions))]


def get_results(tasks: Sequence[Any]) -> list[Any]:
    """Return the results of calls to actors.

    Raises:
        EngineError: one was lost more often than it may be started again, or its devices failed.
        Exception: the one that an actor raised; Ray's own, where a training process is gone.
    """
    with engine_errors():
        return ray.get(list(tasks))


@contextlib.contextmanager
def engine_errors() -> Iterator[None]:
    """Raise what an actor's call has raised, as `get_results` does."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, jax.errors.JaxRuntimeError):  # of no training process
            raise EngineError(f"an engine failed: {error.cause}") from error
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise
    except RayError as error:
        raise EngineError(f"an engine was lost too often: {error}") from error


def _max_tokens(request: Request) -> int:
    return len(request.prompt) + request.sampling.max_new_tokens
