"""An engine whose parts are on nodes of their own: each an `EngineHost`, with the whole model."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import jax
import ray
from ray.exceptions import RayError, RayTaskError

from jaxrl_llm.cluster.context import Member
from jaxrl_llm.cluster.weights import plan, publish
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.engine import EngineError, check_request
from jaxrl_llm.rollout.router import Router
from jaxrl_llm.rollout.types import Completion, Receipt, Request
from jaxrl_llm.sharding import distributed

T = TypeVar("T")


class RemoteEngine:
    """An `Engine` of one or more `EngineHost`s, which sample for all training processes.

    All of these call `load` and `sample`, in the same order; the first one talks to the hosts and
    tells the others what came of it. Which host answers a request depends on nothing but the
    requests that are sampled with it. A host that is lost is replaced by Ray; the new one takes the
    weights that were published last, and all of the requests again that the lost one was at.

    Args:
        member: this process's place in the job.
        spec: the model, without an adapter.
        dtype: of the engines.
        max_tokens: the longest sequence, prompt and answer.
    """

    def __init__(self, member: Member, spec: ModelSpec, *, dtype: str, max_tokens: int) -> None:
        """Hold no weights."""
        self.spec, self.max_tokens = spec, max_tokens
        self._member = member
        self._plan = plan(spec, dtype)
        self._router = Router(len(member.hosts))
        self._pushes, self._turns = itertools.count(), itertools.count()
        self._at: tuple[int, int] | None = None  # push and version
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
        push = next(self._pushes)
        self._at, self._references, tasks = None, [], []
        if distributed.is_first():
            tasks = [host.load.remote(push, version) for host in self._member.hosts]
        published = publish(
            self._member.board, params, self._plan, push=push, process=self._member.number
        )
        receipts: list[Receipt] = distributed.once(lambda: results(tasks))
        if len({receipt[:2] for receipt in receipts}) > 1:
            raise EngineError(f"engines hold different weights after one push: {receipts}")
        self._references, self._at = published, (push, version)
        return receipts[0]._replace(moved_bytes=sum(r.moved_bytes for r in receipts))

    def sample(self, requests: Sequence[Request]) -> list[Completion]:
        """Sample one answer for each request, in order."""
        for request in requests:
            self._check(request)
        at = self._held()
        return self._shared(lambda: self._sample(requests, at))

    async def generate(self, request: Request) -> Completion:
        """Sample one answer; only where one process trains. Cancelling does not reach the host."""
        if distributed.count() > 1:
            raise EngineError("only `sample` can be called where several processes train")
        self._check(request)
        at, place = self._held(), self._router.choose(request.prompt, _most(request))
        try:
            task = self._member.hosts[place].sample.remote([request], *at)
            return (await asyncio.to_thread(results, [task]))[0][0]
        finally:
            self._router.done(place, _most(request), request.prompt)

    async def stream(self, request: Request) -> AsyncIterator[Completion]:
        """Yield one answer, in one piece."""
        yield await self.generate(request)

    def pause(self) -> None:
        """Start nothing new."""
        self._tell("pause")

    def resume(self) -> None:
        """Go on."""
        self._tell("resume")

    def sleep(self) -> None:
        """Pause, and free the caches."""
        self._tell("sleep")

    def wake(self) -> None:
        """Go on after `sleep`."""
        self._tell("wake")

    def close(self) -> None:
        """Forget the weights; the launcher ends the hosts."""
        self._references = []

    def _tell(self, method: str) -> None:
        if distributed.is_first():
            results([host.tell.remote(method) for host in self._member.hosts])

    def _shared(self, make: Callable[[], T]) -> T:
        """Call a function in the first process; the others get its result by the object stores."""
        if distributed.count() == 1:
            return make()
        turn, made, board = next(self._turns), [], self._member.board

        def leave() -> None:
            made.append(make())
            ray.get(board.leave.remote(turn, [ray.put(made[0])]))

        distributed.once(leave)  # what is large does not go through jax's service
        return made[0] if made else ray.get(ray.get(board.left.remote(turn)))

    def _sample(self, requests: Sequence[Request], at: tuple[int, int]) -> list[Completion]:
        router = Router(len(self._member.hosts))  # caches are empty after a push, in a new job, too
        places = [router.choose(r.prompt, _most(r)) for r in requests]
        shares = [
            [i for i, p in enumerate(places) if p == n] for n in range(len(self._member.hosts))
        ]
        tasks = [
            host.sample.remote([requests[i] for i in share], *at)
            for host, share in zip(self._member.hosts, shares, strict=True)
            if share
        ]
        answered = zip((share for share in shares if share), results(tasks), strict=True)
        found = {i: a for share, answers in answered for i, a in zip(share, answers, strict=True)}
        return [found[i] for i in range(len(requests))]

    def _held(self) -> tuple[int, int]:
        if self._at is None:
            raise EngineError("the engine has no weights: call load first")
        return self._at

    def _check(self, request: Request) -> None:
        """Refuse what no engine can serve, before anything is sent; hosts may refuse more."""
        size = self.spec.vocab_size
        check_request(
            request, max_tokens=self.max_tokens, vocab_size=size, most={"top_logprobs": size}
        )


def results(tasks: Sequence[Any]) -> list[Any]:
    """Return what actors answer.

    Raises:
        EngineError: one was lost more often than it may be started again, or its devices failed.
        Exception: the one that an actor raised; Ray's own, where a training process is gone.
    """
    try:
        return ray.get(list(tasks))
    except RayTaskError as error:
        if isinstance(error.cause, jax.errors.JaxRuntimeError):  # of no training process
            raise EngineError(f"an engine failed: {error.cause}") from error
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise
    except RayError as error:
        raise EngineError(f"an engine was lost too often: {error}") from error


def _most(request: Request) -> int:
    return len(request.prompt) + request.sampling.max_new_tokens
