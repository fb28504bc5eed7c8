"""Several processes: who is who, and what one process of several sees."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.runs.checkpoint import Checkpoints
from jaxrl_llm.sharding import distributed, rendezvous
from jaxrl_llm.sharding.layout import make_mesh
from jaxrl_llm.sharding.reshard import reshard

WEIGHTS = np.random.default_rng(0).standard_normal((1024, 768), np.float32)
ADDRESS = {"JAX_COORDINATOR_ADDRESS": "host:1234"}
SLURM = {
    "SLURM_JOB_ID": "5000",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "3",
    "SLURM_STEP_NODELIST": "node[001-0015],host2",
}


def test_who_is_who():
    """By variables of our own, which come before Slurm's."""
    for environment in ({}, {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_NTASKS": "8"}):
        assert rendezvous.find_membership(environment) is None
    given = ADDRESS | {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    assert rendezvous.find_membership(SLURM | given) == ("host:1234", 2, 1)
    for change, named in (
        ({"JAX_NUM_PROCESSES": None}, "JAX_NUM_PROCESSES"),
        ({"JAX_COORDINATOR_ADDRESS": None}, "JAX_COORDINATOR_ADDRESS"),
        ({"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID"),
        ({"JAX_COORDINATOR_ADDRESS": "host"}, "JAX_COORDINATOR_ADDRESS"),
        ({"JAX_COORDINATOR_ADDRESS": "host:70000"}, "JAX_COORDINATOR_ADDRESS"),
    ):
        wrong = {key: value for key, value in (given | change).items() if value is not None}
        with pytest.raises(ValueError, match=named):
            rendezvous.find_membership(wrong)


def test_a_slurm_step_as_jax_itself_reads_it(monkeypatch):
    from jax._src.clusters import SlurmCluster

    for nodes, host in (("node[001,007-015],host2", "node001"), ("gpu-a[3,5]", "gpu-a3")):
        environment = SLURM | {"SLURM_STEP_NODELIST": nodes}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        theirs = SlurmCluster.get_coordinator_address(None, None)
        assert rendezvous.find_membership(environment) == (theirs, 8, 3)
        assert theirs.startswith(f"{host}:")


# --------------------------------------------------------------------- how they meet


def free_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def meet(monkeypatch):
    """Lets processes meet, which are threads here; returns what each of them gets or raises."""
    monkeypatch.setenv(rendezvous.START_TIMEOUT, "60")
    monkeypatch.setattr(rendezvous, "STRANGER_S", 0.5)
    monkeypatch.setattr(rendezvous, "FIRST_WORD_S", 0.1)

    def outcome(address, number, total=2, after=0.0, **facts):
        time.sleep(after)
        try:
            return rendezvous.meet(rendezvous.Membership(address, total, number), facts)
        except (ValueError, TimeoutError) as error:
            return error

    def run(*processes):
        with ThreadPoolExecutor(len(processes)) as pool:
            return list(pool.map(lambda process: outcome(**process), processes))

    return run


def test_processes_meet_in_any_order_whoever_else_comes(meet):
    address = free_address()

    def scan():
        host, port = address.split(":")
        for _ in range(20):
            try:
                with socket.create_connection((host, int(port))) as other:
                    other.sendall(b"GET / HTTP/1.1\r\n\r\n\n")
                    return
            except OSError:
                time.sleep(0.05)

    scanner = threading.Thread(target=scan)
    scanner.start()
    delays = {2: 0.0, 0: 0.2, 1: 0.6}
    came = meet(
        *({"address": address, "number": n, "total": 3, "after": delays[n]} for n in delays)
    )
    scanner.join()
    links = dict(zip(delays, came, strict=True))
    assert {number: set(ends) for number, ends in links.items()} == {0: {1, 2}, 1: {0}, 2: {0}}
    rendezvous.leave(links[1])
    assert rendezvous.has_left(links[0][1])
    links[2][0].connection.close()
    assert not rendezvous.has_left(links[0][2])
    with socket.create_server(("", int(address.split(":")[1]))):  # it is free for jax
        pass
    for link in (*links[0].values(), links[1][0]):
        link.connection.close()


NOT_MET = {  # what processes say of themselves, what they get, and what all errors name
    "another address": ([{"number": 0}, {"number": 1, "address": None}], "TT", "of 2"),
    "too few": ([{"number": 0, "total": 4}, {"number": 2, "total": 4}], "TT", "process 1, 3"),
    "a number twice": ([{"number": n, "total": 3} for n in (0, 1, 1)], "VVV", "JAX_PROCESS_ID"),
    "0 twice": ([{"number": 0}, {"number": 0, "after": 0.2}], "TV", "of 2"),
    "two totals": ([{"number": 0}, {"number": 1, "total": 3}], "VV", "JAX_NUM_PROCESSES=3"),
    "two versions": (
        [{"number": 0, "jax": "0.10.2"}, {"number": 1, "jax": "0.11.0"}],
        *("VV", "jax=0.11.0"),
    ),
}


@pytest.mark.parametrize("name", NOT_MET)
def test_processes_that_do_not_meet_say_why(meet, name, monkeypatch):
    processes, kinds, named = NOT_MET[name]
    if "T" in kinds:
        monkeypatch.setenv(rendezvous.START_TIMEOUT, "1")
    here, gone = free_address(), free_address()
    given = [{"address": here} | process for process in processes]
    came = meet(*(one | {"address": one["address"] or gone} for one in given))
    expected = {"T": TimeoutError, "V": ValueError}
    assert [type(error) for error in came] == [expected[kind] for kind in kinds]
    assert all(named in str(error) for error in came)


@pytest.mark.parametrize(("number", "says"), [(0, b""), (1, b"HTTP/1.1 400 Bad Request\r\n\n")])
def test_an_address_where_another_program_listens_is_refused(meet, number, says):
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            while True:
                try:
                    with other.accept()[0] as connection:
                        connection.sendall(says)
                except OSError:
                    return

        threading.Thread(target=answer, daemon=True).start()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        (error,) = meet({"address": address, "number": number})
        other.shutdown(socket.SHUT_RDWR)
    assert isinstance(error, ValueError)
    assert address in str(error)


def test_an_error_that_cannot_travel_is_named():
    class Odd(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")

    sent = pickle.loads(pickle.dumps(distributed._as_sent(Odd(1, 2))))
    assert str(sent) == "Odd: 1 and 2"
    assert distributed._as_sent(ValueError("same")).args == ("same",)


# --------------------------------------------------------------------- in two processes


def program():
    """Check everything from inside; the processes' standard error shows what was wrong."""
    distributed.initialize()
    distributed.initialize()  # again: nothing happens
    me = distributed.process_index()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert not int(status["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1, "SIGTERM would do nothing"
    assert (distributed.process_count(), jax.device_count(), jax.local_device_count()) == (2, 4, 2)
    mesh = make_mesh({"fsdp": -1})
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    tree = {"a": np.arange(8.0, dtype=np.float32), "b": np.ones((4, 3), bool)}
    placed = distributed.put(tree, {"a": split, "b": NamedSharding(mesh, PartitionSpec())})
    assert not placed["a"].is_fully_addressable
    again = distributed.put(placed, split)
    for copied in (placed, again, jax.jit(lambda t: jax.tree.map(jnp.copy, t))(placed)):
        for name, value in distributed.fetch(copied).items():
            np.testing.assert_array_equal(value, tree[name])

    reshape(mesh)
    large = bytes([me]) * (3 * distributed.PART_BYTES + 7)
    assert distributed.all_gather(large) == [b"\0" * len(large), b"\1" * len(large)]
    parts = distributed.all_gather(list(range(7))[distributed.process_slice(7)])
    assert parts == [[0, 1, 2], [3, 4, 5, 6]]

    assert distributed.run_on_first(lambda: me) == 0

    def fail():
        raise KeyError(f"process {me}")

    try:
        distributed.run_on_first(fail)
    except KeyError as error:
        assert error.args == ("process 0",)
    else:
        raise AssertionError("no error arrived")

    mark = Path(sys.argv[1]) / "mark"
    if me:
        time.sleep(0.2)
        mark.touch()
    distributed.wait_for_all("a place")
    assert mark.exists()
    checkpoint(Path(sys.argv[1]), mesh)
    print("well")


def reshape(mesh):
    """Move an array among layouts of all devices, in slices; it can't leave a process."""
    value = np.arange(6 * 16 * 32, dtype=np.float32).reshape(6, 16, 32)
    shuffled = make_mesh({"fsdp": 2, "tensor": 2}, [jax.devices()[i] for i in (3, 1, 0, 2)])
    few = make_mesh({"fsdp": 2}, [jax.devices()[i] for i in (1, 2)])
    layouts = [NamedSharding(mesh, PartitionSpec(None, "fsdp"))]
    layouts += [NamedSharding(shuffled, PartitionSpec(None, "fsdp", "tensor"))]
    layouts += [NamedSharding(few, PartitionSpec(None, "fsdp"))]
    layouts += [NamedSharding(mesh, PartitionSpec())]
    array = jax.make_array_from_callback(value.shape, layouts[0], lambda index: value[index])
    for layout in [*layouts[1:], layouts[0]]:
        array = reshard(array, layout, donate=True, bucket_bytes=8192)
        assert array.sharding.is_equivalent_to(layout, 3)
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, value[shard.index])
    try:
        own = make_mesh({"fsdp": 2}, jax.devices()[:2])
        reshard(array, NamedSharding(own, PartitionSpec("fsdp")))
    except NotImplementedError as error:
        assert "[0, 1] to [0]" in str(error), error
    else:
        raise AssertionError("moved to one process")


def like(mesh, *parts):
    sharding = NamedSharding(mesh, PartitionSpec(*parts))
    return {"w": jax.ShapeDtypeStruct(WEIGHTS.shape, WEIGHTS.dtype, sharding=sharding)}


def checkpoint(folder, mesh):
    """Read what one process wrote, each array also where all devices hold a copy; write it anew."""
    restored = Checkpoints(folder / "one", keep=None, read_only=True).restore(
        like(mesh, None, "fsdp")
    )
    np.testing.assert_array_equal(distributed.fetch(restored.state)["w"], WEIGHTS)
    assert restored.extra == {"by": "one"}
    both = make_mesh({"data": 2, "fsdp": 2})
    saved = Checkpoints(folder / "two", keep=1)
    for step in (1, 2):
        donated = distributed.put({"w": WEIGHTS * step}, like(both, "fsdp")["w"].sharding)
        saved.save(step, donated, {"by": f"process {distributed.process_index()}"})
        jax.block_until_ready(jax.jit(jnp.negative, donate_argnums=0)(donated["w"]))
    saved.close()


def start(number, address, folder):
    tests_own = ("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(tests_own)}
    env |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(number),
    }
    return subprocess.Popen(
        [sys.executable, __file__, str(folder)],
        cwd=Path(__file__).parents[2],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_two_processes(tmp_path):
    one, devices = make_mesh({"tensor": 8}), jax.devices()
    saved = Checkpoints(tmp_path / "one", keep=None)
    saved.save(7, jax.device_put({"w": WEIGHTS}, like(one, "tensor")["w"].sharding), {"by": "one"})
    saved.close()
    address = free_address()
    for process in [start(number, address, tmp_path) for number in range(2)]:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert "well" in out

    saved = Checkpoints(tmp_path / "two", keep=None, read_only=True)
    restored = saved.restore(like(make_mesh({"fsdp": 3}, devices[:3]), None, "fsdp"))
    np.testing.assert_array_equal(restored.state["w"], WEIGHTS * 2)
    assert (restored.step, restored.extra) == (2, {"by": "process 0"})
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["2"]
    size = sum(path.stat().st_size for path in (tmp_path / "two").rglob("*") if path.is_file())
    assert size < 1.05 * WEIGHTS.nbytes  # each part once, though two processes hold it


if __name__ == "__main__":
    program()
