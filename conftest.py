"""Test set-up: eight CPU devices, so that every test can build real meshes; no network."""

import contextlib
import ctypes
import gc
import hashlib
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import zlib
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["PJRT_NPROC"] = "128"  # threads for eight devices that wait for each other
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

ON_CPU = not os.environ.get("JAX_PLATFORMS", "").startswith("cuda")
FAST_COMPILATION = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
"""Most of the tests' time is XLA's compilation, which takes a third as long so.

Some runs that tests start as processes compile as a user's do (`Workshop.start`).
"""

if ON_CPU:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

collect_ignore = [  # they run where vLLM is, and we are not
    "jaxrl_llm/rollout/vllm/sidecar",
    "tests/rollout/vllm_kernels",
]

hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=25)
hypothesis.settings.load_profile("fixed")

SHARED_CACHE = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
"""Makes jax keep small programs, too, in the folder that `_share_compiled` names."""

MAX_CACHE_BYTES = 2 * 1024**3

MOST_MAPPINGS, MOST_RESIDENT_BYTES = 8_000, 2 * 1024**3

LONGEST_FIRST = [
    *("tests/e2e/cluster/test_training.py", "tests/e2e/cluster/test_engines.py"),
    *("tests/e2e/cluster/test_launcher.py", "tests/e2e/test_configs.py"),
    *(f"tests/e2e/test_{name}.py" for name in ("processes", "same_run", "vision", "runs")),
    *("tests/e2e/test_refusals.py", "tests/models/test_lora.py", "tests/properties/test_meshes.py"),
]
"""Files that take minutes begin first, or one worker would be left with one of them."""


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as of what a shell has in background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # runs as processes inherit it
    if not ON_CPU or hasattr(config, "workerinput"):
        return
    if "XLA_FLAGS" not in os.environ and _has_flags(config):
        os.environ["XLA_FLAGS"] = FAST_COMPILATION
    if hasattr(config, "cache"):
        _share_compiled(config.cache.mkdir("compiled"))


def _has_flags(config):
    """Whether this XLA has the flags of `FAST_COMPILATION`: it ends the process if not."""
    cache = getattr(config, "cache", None)
    key = f"xla_flags/{importlib.metadata.version('jaxlib')} {FAST_COMPILATION}"
    if (known := cache and cache.get(key, None)) is None:
        words = [sys.executable, "-c", "import jax; jax.devices('cpu')"]
        environ = os.environ | {"XLA_FLAGS": FAST_COMPILATION}
        known = not subprocess.run(words, env=environ, check=False, capture_output=True).returncode
        if cache:
            cache.set(key, known)
    return known


def _share_compiled(folder):
    """Let workers, the processes that tests start and the next session share what XLA compiles.

    A test that is about compiling takes the fixture `compiles_alone`.
    """
    if sum(entry.stat().st_size for entry in os.scandir(folder)) > MAX_CACHE_BYTES:
        shutil.rmtree(folder)
    for name, value in {"jax_compilation_cache_dir": str(folder), **SHARED_CACHE}.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)


@pytest.fixture
def compiles_alone(monkeypatch, tmp_path):
    """Has everything compiled that the test needs, here and in the processes that it starts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    names = ("jax_compilation_cache_dir", *SHARED_CACHE)
    before = {name: getattr(jax.config, name) for name in names}
    for name in names:
        monkeypatch.delenv(name.upper(), raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(autouse=True, scope="module")
def spared_by_collections():
    """Takes what other modules hold from the garbage collector: it took a tenth of the time.

    Compiled programs are let go of where they are many, or hold much memory: Linux gives a process
    65,530 mappings, of which each takes some, and XLA crashes without.
    """
    mappings, resident_bytes = _taken()
    has_much = mappings > MOST_MAPPINGS or resident_bytes > MOST_RESIDENT_BYTES
    if has_much:
        jax.clear_caches()
        gc.unfreeze()
    gc.collect()
    gc.freeze()
    if has_much:
        with contextlib.suppress(AttributeError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)


def _taken():
    """Return the mappings and the bytes of memory that this process has; 0 where none says."""
    folder = Path("/proc/self")
    if not folder.exists():
        return 0, 0
    pages = int((folder / "statm").read_text().split()[1])
    return len((folder / "maps").read_bytes().splitlines()), pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def compiles_on_demand(monkeypatch):
    """Has programs that are needed later compiled when they are needed: most tests end before."""
    from jaxrl_llm.compilation import BACKGROUND

    monkeypatch.setattr(BACKGROUND, "release", lambda: None)
    BACKGROUND.hold()
    yield
    BACKGROUND.clear()


@pytest.fixture(scope="module")
def one_device():
    """Has runs take one of the eight devices, where they would take all."""
    some = jax.devices()[:1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax.devices", lambda: some)
        yield


@pytest.fixture
def compile_rest():
    """Compiles what is needed later, and waits for it."""
    from jaxrl_llm.compilation import BACKGROUND

    def compile_now():
        type(BACKGROUND).release(BACKGROUND)
        BACKGROUND.wait()

    return compile_now


@pytest.fixture
def patient(monkeypatch, compile_rest):
    """Has all programs compiled before the second step begins."""
    from jaxrl_llm.compilation import BACKGROUND

    monkeypatch.setattr(BACKGROUND, "release", compile_rest)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collects no garbage meanwhile, which took a quarter of the time: what is imported stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path, parent):
    """Looks for examples in the library alone: to look through the tests takes seconds."""
    found = yield
    is_test = "tests" in file_path.relative_to(parent.config.rootpath).parts
    return [c for c in found if not (is_test and type(c).__name__ == "DoctestModule")]


def pytest_addoption(parser):
    parser.addoption(
        "--changed-since",
        metavar="REVISION",
        help="leave out the slow tests whose paths (their marker `guards`) have not changed since, "
        "but for another quarter of them at each commit",
    )
    parser.addoption(
        "--slow-at-most",
        type=int,
        metavar="N",
        help="of the slow tests that --changed-since leaves, run N, at each commit others; those "
        "whose own file has changed come first",
    )


@pytest.hookimpl(trylast=True)  # after -m has left some out
def pytest_collection_modifyitems(config, items):
    ranks = {file: rank for rank, file in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(ranks)))
    for item in filter(_is_slow, items):
        paths = _guarded(item)
        wrong = [path for path in paths if not (config.rootpath / path).exists()]
        if wrong or not paths:
            raise pytest.UsageError(f"{item.nodeid} is slow; expected paths in `guards`: {wrong}")
    revision = config.getoption("--changed-since")
    if revision is None:
        return
    changed = _git(config, "diff", "--name-only", revision).split()
    commits = int(_git(config, "rev-list", "--count", "HEAD"))
    left_out = [item for item in items if _may_wait(item, changed, commits % 4)]
    left_out += _above(config.getoption("--slow-at-most"), items, left_out, changed, commits)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _git(config, *words):
    words = ["git", "-C", str(config.rootpath), *words]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def _is_slow(item):
    return any(item.get_closest_marker(name) for name in ("slow", "vllm", "gpu_compiler"))


def _guarded(item):
    return [path for marker in item.iter_markers("guards") for path in marker.args]


def _may_wait(item, changed, turn):
    """Whether nothing has changed for which a slow test stands guard, and it is not its turn."""
    own = item.nodeid.partition("::")[0]
    is_touched = any(path.startswith((*_guarded(item), own)) for path in changed)
    return _is_slow(item) and not is_touched and zlib.crc32(item.nodeid.encode()) % 4 != turn


def _above(limit, items, left_out, changed, commits):
    """Return the slow tests that are too many: last those whose own file has changed."""

    def rank(item):
        is_changed = item.nodeid.partition("::")[0] in changed
        turn = hashlib.sha256(f"{commits} {item.nodeid}".encode()).digest()
        return not is_changed, turn

    slow = [item for item in items if _is_slow(item) and item not in left_out]
    return [] if limit is None else sorted(slow, key=rank)[limit:]


@pytest.fixture(autouse=True)
def promotion(request):
    """Has equations say where a dtype changes, and in algorithms also over which axes they go.

    Models broadcast biases and norms over all axes; optax, in training, promotes dtypes.
    """
    folders = request.path.relative_to(request.config.rootpath).parts
    is_strict = "algorithms" in folders or "models" in folders
    with (
        jax.numpy_dtype_promotion("strict" if is_strict else "standard"),
        jax.numpy_rank_promotion("raise" if "algorithms" in folders else "allow"),
    ):
        yield


@pytest.fixture(scope="session", autouse=True)
def tiny_spec_in_doctests(doctest_namespace):
    """Lets doctests say `tiny_spec(layers=3)`, and `tiny_vision` of a tower."""
    from tests.specs import tiny_spec, tiny_vision  # not before jaxtyping checks what is imported

    doctest_namespace |= {"tiny_spec": tiny_spec, "tiny_vision": tiny_vision}


NODES = """
import contextlib, socket, sys, time
from ray.cluster_utils import Cluster
count, cpus, port = map(int, sys.argv[1:])
head = {"num_cpus": cpus, "include_dashboard": False, "ray_client_server_port": port or None}
made = Cluster(initialize_head=True, head_node_args=head)
for _ in range(count - 1):
    made.add_node(num_cpus=cpus)
for _ in range(600 if port else 0):
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection((made.address.rpartition(":")[0], port)).close()
        break
    time.sleep(0.1)
print("address", made.address, flush=True)
sys.stdin.read()
made.shutdown()
"""


@contextlib.contextmanager
def _ray_nodes(count, cpus, client_port=0):
    words = [sys.executable, "-c", NODES, str(count), str(cpus), str(client_port)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nodes:
        assert nodes.stdout is not None
        lines = iter(nodes.stdout.readline, "")
        yield next(line.split()[1] for line in lines if line.startswith("address "))


@pytest.fixture(scope="session")
def ray_nodes():
    """Starts a Ray cluster of so many nodes, from a process that has no threads of jax to fork.

    It listens at `client_port`, if given, for `ray://`.
    """
    return _ray_nodes


@contextlib.contextmanager
def _small_disk(folder, size):
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if (
        not shutil.which("mount")
        or subprocess.run(mount, check=False, capture_output=True).returncode
    ):
        pytest.skip("needs the right to mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="session")
def small_disk():
    """Mounts a file system in memory at a folder; its size is in words of mount's, as 256k."""
    return _small_disk
