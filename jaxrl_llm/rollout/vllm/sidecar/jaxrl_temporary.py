"""A sidecar's temporary files: a folder of its own, which ends with it however it ends.

vLLM leaves its sockets and other files in the temporary folder, and shared memory behind: it is
killed in the end, together with all processes of its group. This file runs in vLLM's environment
and imports nothing of this library.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from multiprocessing import resource_tracker, util
from pathlib import Path

LOCK = "lock"  # a file that all hold who use the folder
LONGEST_BASE = 40  # bytes; with this module's and vLLM's names, a socket's path can have 107
SHARED_MEMORY = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def make_folder(token: str) -> tuple[Path, int]:
    """Make a folder for temporary files, let this process's files go there, and lock it.

    Folders of sidecars that have ended without removing theirs are removed.

    Args:
        token: end of the folder's name, and of no other's.

    Returns:
        the folder, and the descriptor of its lock: whoever has it open holds the lock.
    """
    base = Path(tempfile.gettempdir())
    if len(os.fsencode(base)) > LONGEST_BASE:
        base = Path("/tmp")
    folder = base / f"{_prefix()}{token}"
    lock = None
    while lock is None:
        lock = _make_locked(folder)
    remove_abandoned(base)
    _keep_compiled()
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.environ.setdefault("VLLM_RPC_BASE_PATH", str(folder))  # of sockets
    return folder, lock


def remove_abandoned(base: Path) -> None:
    """Remove the folders of sidecars of this user, on this machine, of which no process is left."""
    for folder in base.glob(f"{_prefix()}*"):
        with contextlib.suppress(OSError):  # it is in use, or another process was faster
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            lock = _open_lock(folder)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(folder)
            finally:
                os.close(lock)


def remove(folder: Path) -> None:
    """Remove a folder, and the shared memory that vLLM names after files in it.

    These files are rendezvous of ranks on CPUs. vLLM's extension opens that memory by itself, so
    that Python's resource tracker does not know it.
    """
    for rendezvous in folder.glob("vllm_dist_*"):
        for memory in SHARED_MEMORY.glob(f"{rendezvous.name}-*"):
            memory.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def start_tracker(folder: Path, lock: int) -> None:
    """Start Python's resource tracker in a session of its own, and let it remove the folder.

    All processes of the sidecar share this tracker. After the last of them it removes the shared
    memory and semaphores that they left, and then the folder. As a part of the sidecar's group, as
    it is by default, it would be killed with them.

    Args:
        folder: for temporary files.
        lock: descriptor of its lock.
    """

    def spawn(path: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        clean = (
            f"import atexit, pathlib, sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
            "import jaxrl_temporary; "
            f"atexit.register(jaxrl_temporary.remove, pathlib.Path({str(folder)!r})); "
        )
        return subprocess.Popen(
            [path, "-I", "-W", "ignore", "-c", clean + arguments[-1]],  # its warnings say "leaked"
            pass_fds=[*descriptors, lock],
            start_new_session=True,
        ).pid

    original, util.spawnv_passfds = util.spawnv_passfds, spawn
    try:
        resource_tracker.ensure_running()
    finally:
        util.spawnv_passfds = original


def _prefix() -> str:
    """Return how names begin of folders whose locks this machine can see."""
    return f"jaxrl-{BOOT_ID.read_text()[:8]}-"


def _make_locked(folder: Path) -> int | None:
    """Make a folder and lock it; None: another process took it for abandoned and removed it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        lock = _open_lock(folder)
    except FileNotFoundError:
        return None
    # a file system without locks: no other process can lock it either, so none removes it
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX)
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(lock), (folder / LOCK).stat()):
            return lock
    os.close(lock)
    return None


def _open_lock(folder: Path) -> int:
    return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _keep_compiled() -> None:
    """Let torch keep what it compiles in vLLM's cache, where it could be written."""
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    vllm = os.environ.get("VLLM_CACHE_ROOT") or f"{root}/vllm"
    cache = Path(vllm).expanduser() / "torchinductor"
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
