"""Several processes that run one program: start, exchange, and end together.

Each process runs the same program and calls the same jitted functions in the same order, on arrays
over the devices of all. What lies on the host is equal in all of them, so a host array becomes a
global one without communication (`put`), and a global one is gathered to come back (`fetch`). Small
Python objects travel through the coordination service, without the devices.
"""

import atexit
import collections
import contextlib
import importlib.metadata
import itertools
import os
import pickle
import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax._src.distributed import global_state  # the public API has no way to its client
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxrl_llm.sharding import rendezvous
from jaxrl_llm.sharding.rendezvous import Link, find_membership

T = TypeVar("T")

HEARTBEAT = "JAXRL_LLM_HEARTBEAT_TIMEOUT_S"
HEARTBEAT_TIMEOUT_S = 100  # after which a process that is silent counts as lost
FAILED = "jaxrl_llm/failed"
LOOK_SECONDS = 1.0  # between two looks whether another process has failed
GRACE_SECONDS = 3.0  # for the process that failed to report its error
PART_BYTES = 2**20  # of one message: the service's messages are bounded
THREADS_PER_DEVICE = 16  # of the CPU; most of them sleep
FOREVER_MS = 7 * 24 * 3600 * 1000  # a process that is gone ends the others
LONGEST_WAIT_MS = 600 * 1000

_numbers = itertools.count()
_visits = collections.Counter[str]()
_own_keys: list[tuple[int, str]] = []
_ending = threading.Event()


def initialize() -> None:
    """Join the other processes, if the environment says that there are any; once.

    It comes before anything else that uses jax's devices. Several CPU devices get threads enough: a
    collective holds one until all have come, in whatever order each device took its collectives,
    and XLA's default of one for each device can run out. From then on a process whose
    `abort_together` sees an error ends the others. So does one that dies, whose connection breaks;
    where a whole machine is lost, jax notices by `JAXRL_LLM_HEARTBEAT_TIMEOUT_S` without heartbeat.

    Raises:
        ValueError: The environment is incomplete, or the processes can't make up a run; see `meet`.
        TimeoutError: They did not all come.
    """
    settings: Any = jax.config
    devices = settings.jax_num_cpu_devices
    if devices > 1:
        os.environ.setdefault("PJRT_NPROC", str(THREADS_PER_DEVICE * devices))
    membership = find_membership(os.environ)
    if membership is None or membership.total == 1 or global_state.client is not None:
        return
    heartbeat_s = rendezvous.seconds_of(HEARTBEAT, HEARTBEAT_TIMEOUT_S)
    links = rendezvous.meet(
        membership, {n: importlib.metadata.version(n) for n in ("jax", "jaxlib")}
    )
    settings.update("jax_enable_preemption_service", False)  # it takes SIGTERM, and does nothing
    jax.distributed.initialize(
        *membership,
        cluster_detection_method="deactivate",
        initialization_timeout=rendezvous.start_timeout(),
        heartbeat_timeout_seconds=heartbeat_s,
    )
    jax.devices()  # the processes tell each other theirs, which takes all of them
    threading.Thread(target=_watch, daemon=True, name="processes").start()
    atexit.register(rendezvous.leave, links)
    threading.Thread(target=_watch_links, args=(links,), daemon=True, name="links").start()


def process_count() -> int:
    """Return the number of processes.

    >>> process_count()
    1
    """
    return global_state.num_processes or 1


def process_index() -> int:
    """Return which process this is, from 0 on.

    >>> process_index()
    0
    """
    return global_state.process_id or 0


def is_first() -> bool:
    """Return whether this process writes what is written once.

    >>> is_first()
    True
    """
    return process_index() == 0


def process_slice(items: int) -> slice:
    """Return this process's part of a list of so many items; the parts differ by one at most.

    >>> process_slice(3)
    slice(0, 3, None)
    """
    index, processes = process_index(), process_count()
    return slice(items * index // processes, items * (index + 1) // processes)


# ------------------------------------------------------------------------------- arrays


def put(tree: Any, sharding: Any) -> Any:
    """Put arrays on the devices of all processes.

    Args:
        tree: Host arrays, which are equal in all processes, or arrays on those devices.
        sharding: One for each of them, or one for all.

    Returns:
        Arrays in that layout.

    >>> put({"a": np.ones(2)}, jax.sharding.SingleDeviceSharding(jax.devices()[0]))["a"].shape
    (2,)
    """
    if process_count() == 1:
        return jax.device_put(tree, sharding)
    leaves, structure = jax.tree.flatten(tree)
    one = isinstance(sharding, Sharding)
    targets = [sharding] * len(leaves) if one else structure.flatten_up_to(sharding)
    return jax.tree.unflatten(structure, map(_put_array, leaves, targets))


def _put_array(array: Any, sharding: Sharding) -> jax.Array:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return jax.device_put(array, sharding)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda part: host[part])


def fetch(tree: Any) -> Any:
    """Bring arrays to the host, whole, in every process; all of them call it in the same order.

    Args:
        tree: Arrays.

    Returns:
        Numpy arrays.

    >>> fetch({"a": jax.numpy.ones(2)})
    {'a': array([1., 1.], dtype=float32)}
    """
    return jax.device_get(replicate(tree))


def replicate(tree: Any) -> Any:
    """Replicate arrays of which a process holds a part only, by one program for all of them.

    Args:
        tree: Arrays.

    Returns:
        Arrays that this process can read; those that it could read before are the same.

    >>> replicate({"a": jax.numpy.arange(2)})
    {'a': Array([0, 1], dtype=int32)}
    """
    leaves, structure = jax.tree.flatten(tree)
    far = [
        i
        for i, x in enumerate(leaves)
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)
    ]
    if far:
        parts = [leaves[i] for i in far]
        replicated = jax.jit(_same, out_shardings=[_everywhere(x.sharding) for x in parts])(parts)
        for i, array in zip(far, replicated, strict=True):
            leaves[i] = array
    return jax.tree.unflatten(structure, leaves)


def _same(arrays: list[jax.Array]) -> list[jax.Array]:
    return arrays


def _everywhere(layout: Sharding) -> NamedSharding:
    if isinstance(layout, NamedSharding):
        return NamedSharding(layout.mesh, PartitionSpec())
    devices = sorted(layout.device_set, key=lambda device: device.id)
    return NamedSharding(Mesh(np.array(devices), "device"), PartitionSpec())


# ------------------------------------------------------------------------ Python objects


def all_gather(item: T) -> list[T]:
    """Return the items of all processes, in their order; all of them wait for all.

    Only the main thread calls it, as `run_on_first`, and in the same order in all processes.

    Args:
        item: What pickle takes; megabytes at most.

    >>> all_gather("mine")
    ['mine']
    """
    if process_count() == 1:
        return [item]
    turn = next(_numbers)
    _send(turn, item)
    items = [_receive(turn, sender) for sender in range(process_count())]
    while _own_keys and _own_keys[0][0] < turn:  # everyone is here, so has read what came before
        _client().key_value_delete(_own_keys.pop(0)[1])
    return items


def wait_for_all(place: str) -> None:
    """Wait until all processes have come to a place, each as often as this one; from any thread.

    A collective whose program one process still compiles waits for it 30 seconds on CPUs. So all
    wait here before they first run it, but ten minutes at most.

    >>> wait_for_all("compiled decode 8 x 16")
    """
    if process_count() > 1:
        _visits[place] += 1
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            _client().wait_at_barrier(f"jaxrl_llm/{place}/{_visits[place]}", LONGEST_WAIT_MS)


def run_on_first(make: Callable[[], T]) -> T:
    """Call a function in the first process; the others wait for it.

    Args:
        make: Returns what pickle takes.

    Returns:
        Its result, in all processes.

    Raises:
        Exception: The one that it raised, in all processes.

    >>> run_on_first(lambda: 3)
    3
    """
    if process_count() == 1:
        return make()
    turn = next(_numbers)
    if not is_first():
        result, error = _receive(turn, 0)
        if error is not None:
            raise error
        return result
    try:
        result = make()
    except Exception as error:
        _send(turn, (None, _as_sent(error)))
        raise
    _send(turn, (result, None))
    return result


def _as_sent(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error of one's own with other arguments than a message
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _client() -> Any:
    return global_state.client


def _send(turn: int, item: Any) -> None:
    message = pickle.dumps(item)
    parts = [message[i : i + PART_BYTES] for i in range(0, len(message), PART_BYTES)]
    for i, part in enumerate(parts):
        key = f"jaxrl_llm/{turn}/{process_index()}/{i}"
        _client().key_value_set_bytes(key, bytes([i + 1 == len(parts)]) + part)
        _own_keys.append((turn, key))


def _receive(turn: int, sender: int) -> Any:
    return pickle.loads(b"".join(_parts(turn, sender)))


def _parts(turn: int, sender: int) -> Iterable[bytes]:
    for i in itertools.count():
        key = f"jaxrl_llm/{turn}/{sender}/{i}"
        part = _client().blocking_key_value_get_bytes(key, FOREVER_MS)
        yield part[1:]
        if part[0]:
            return


# --------------------------------------------------------------------------- the end


@contextlib.contextmanager
def abort_together(
    agreed: tuple[type[BaseException], ...] = (),
    status: Callable[[BaseException], int] = lambda error: 1,
) -> Iterator[None]:
    """End all processes when this one fails: an error that leaves the block is told to the others.

    They print it and end, wherever they wait. This process has some seconds to clean up and to
    report, then it ends, too.

    Args:
        agreed: Errors that all processes raise at the same place, so that nobody has to be told.
        status: error -> exit status of all processes.

    >>> with abort_together():
    ...     pass
    """
    try:
        yield
    except agreed:
        raise
    except BaseException as error:
        if process_count() > 1 and not _ending.is_set():
            text = " ".join(f"{type(error).__name__}: {error}".split())
            _announce(process_index(), status(error), text)
        raise


def is_aborting() -> bool:
    """Return whether the run has failed, so that the other processes can't be waited for.

    >>> is_aborting()
    False
    """
    return _ending.is_set()


def _announce(number: int, status: int, text: str) -> None:
    _ending.set()
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another was quicker
        _client().key_value_set(FAILED, f"{number} {status} {text}")


def _watch() -> None:
    while True:
        time.sleep(LOOK_SECONDS)
        try:
            who, status, text = _client().key_value_try_get(FAILED).split(" ", 2)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                continue
            return  # the run is over
        except AttributeError:  # so it is, and there is no client any more
            return
        if not _ending.is_set():
            sys.stderr.write(f"process {process_index()} ends, as process {who} failed: {text}\n")
        if _ending.is_set() or is_first():  # without the first, jax aborts the others
            time.sleep(GRACE_SECONDS + is_first())
        _end(int(status))


def _watch_links(links: Mapping[int, Link]) -> None:
    """End the run when the connection to a process breaks that has not said that it leaves."""
    with selectors.DefaultSelector() as selector:
        for number, link in links.items():
            selector.register(link.connection, selectors.EVENT_READ, number)
        while selector.get_map():
            for key, _ in selector.select():
                selector.unregister(key.fileobj)
                if not rendezvous.has_left(links[key.data]):
                    _lose(key.data, links[key.data].name)


def _lose(number: int, name: str) -> None:
    if _ending.is_set():
        return
    text = f"{name} is gone without a word; was it killed?"
    sys.stderr.write(f"process {process_index()} ends, as process {number} failed: {text}\n")
    if not is_first():  # jax would abort this one in a moment
        _end(1)
    with contextlib.suppress(AttributeError):  # the run is over
        _announce(number, 1, text)


def _end(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
