"""A filter of system calls (seccomp), so that code can only ask the kernel for what it needs.

What the table does not name is refused. Some calls are allowed for some arguments alone.
"""

import ctypes
import errno
import platform
import struct
from collections.abc import Sequence
from typing import NamedTuple

CALLS = """
    read 0 63; write 1 64; readv 19 65; writev 20 66; pread64 17 67; pwrite64 18 68;
    preadv 295 69; pwritev 296 70; preadv2 327 286; pwritev2 328 287; open 2 -; openat 257 56;
    close 3 57; close_range 436 436; creat 85 -; lseek 8 62; stat 4 -; fstat 5 80; lstat 6 -;
    newfstatat 262 79; statx 332 291; access 21 -; faccessat 269 48; faccessat2 439 439;
    readlink 89 -; readlinkat 267 78; getcwd 79 17; chdir 80 49; fchdir 81 50; statfs 137 43;
    fstatfs 138 44; getdents 78 -; getdents64 217 61; mkdir 83 -; mkdirat 258 34; rmdir 84 -;
    unlink 87 -; unlinkat 263 35; rename 82 -; renameat 264 38; renameat2 316 276; link 86 -;
    linkat 265 37; symlink 88 -; symlinkat 266 36; ftruncate 77 46; fallocate 285 47; fsync 74 82;
    fdatasync 75 83; sync_file_range 277 84; flock 73 32; fadvise64 221 223; sendfile 40 71;
    copy_file_range 326 285; umask 95 166; getxattr 191 8; lgetxattr 192 9; fgetxattr 193 10;
    listxattr 194 11; llistxattr 195 12; flistxattr 196 13; dup 32 23; dup2 33 -; dup3 292 24;
    pipe 22 -; pipe2 293 59; fcntl 72 25; ioctl 16 29; poll 7 -; ppoll 271 73; select 23 -;
    pselect6 270 72; epoll_create 213 -; epoll_create1 291 20; epoll_ctl 233 21; epoll_wait 232 -;
    epoll_pwait 281 22; epoll_pwait2 441 441; eventfd 284 -; eventfd2 290 19;
    timerfd_create 283 85; timerfd_settime 286 86; timerfd_gettime 287 87; signalfd 282 -;
    signalfd4 289 74; mmap 9 222; munmap 11 215; mprotect 10 226; mremap 25 216; madvise 28 233;
    brk 12 214; msync 26 227; mlock 149 228; munlock 150 229; membarrier 324 283; futex 202 98;
    futex_waitv 449 449; set_robust_list 273 99; rseq 334 293; set_tid_address 218 96;
    arch_prctl 158 -; clone 56 220; clone3 435 435; fork 57 -; vfork 58 -; execve 59 221;
    exit 60 93; exit_group 231 94; wait4 61 260; waitid 247 95; getpid 39 172; getppid 110 173;
    gettid 186 178; getpgid 121 155; setpgid 109 154; getpgrp 111 -; getsid 124 156;
    setsid 112 157; getuid 102 174; geteuid 107 175; getgid 104 176; getegid 108 177;
    getresuid 118 148; getresgid 120 150; getgroups 115 158; kill 62 129; tkill 200 130;
    tgkill 234 131; rt_sigaction 13 134; rt_sigprocmask 14 135; rt_sigreturn 15 139;
    rt_sigpending 127 136; rt_sigtimedwait 128 137; rt_sigsuspend 130 133; sigaltstack 131 132;
    pause 34 -; restart_syscall 219 128; alarm 37 -; getitimer 36 102; setitimer 38 103;
    timer_create 222 107; timer_settime 223 110; timer_gettime 224 108; timer_getoverrun 225 109;
    timer_delete 226 111; nanosleep 35 101; clock_nanosleep 230 115; clock_gettime 228 113;
    clock_getres 229 114; gettimeofday 96 169; time 201 -; times 100 153; getrlimit 97 163;
    setrlimit 160 164; prlimit64 302 261; getrusage 98 165; sysinfo 99 179; uname 63 160;
    getcpu 309 168; getrandom 318 278; getpriority 140 141; sched_yield 24 124;
    sched_getaffinity 204 123; sched_getparam 143 121; sched_getscheduler 145 120;
    sched_get_priority_max 146 125; sched_get_priority_min 147 126; socketpair 53 199;
    sendto 44 206; recvfrom 45 207; sendmsg 46 211; recvmsg 47 212; shutdown 48 210;
    getsockopt 55 209; getsockname 51 204; getpeername 52 205; prctl 157 167; chmod 90 -;
    fchmod 91 52; fchmodat 268 53; utime 132 -; utimes 235 -; utimensat 280 88; futimesat 261 -;
"""
"""The calls that are allowed: name, number on x86-64, number on aarch64 (- where there is none)."""

SIGNAL_CALLS = ("kill", "tkill", "tgkill")
METADATA_CALLS = ("chmod", "fchmod", "fchmodat", "utime", "utimes", "utimensat", "futimesat")
AUDIT_ARCHS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000

ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # of linux/bpf_common.h
ARCH_OFFSET, ARGUMENTS_OFFSET = 4, 16  # in struct seccomp_data

SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
SECCOMP_SET_MODE_FILTER = 1
PR_SET_NO_NEW_PRIVS = 38

NAMESPACE_FLAGS = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
CLONE_PARENT = 0x00008000  # a child of whoever has started the code, with a signal at its end
PRCTL_ALLOWED = (3, 15, 16, 0x53564D41)  # GET_DUMPABLE, SET_NAME, GET_NAME, SET_VMA
FCNTL_REFUSED = (8, 10, 15, 1024, 1026)  # SETOWN, SETSIG, SETOWN_EX, SETLEASE, NOTIFY: signals
IOCTL_ALLOWED = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX and FIOCLEX; others change even files that were
opened to be read, or send signals."""

AF_UNIX, SOCK_STREAM, SOCK_FLAGS = 1, 1, 0o2004000  # CLOEXEC and NONBLOCK
O_ACCMODE, O_TRUNC = 3, 0o1000

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


class Allowed(NamedTuple):
    """What other layers make harmless, so that the filter lets it pass.

    Attributes:
        signals: to other processes; else a process may signal itself alone.
        metadata: modes and times of files, which Landlock does not guard.
    """

    signals: bool
    metadata: bool


def call_numbers(machine: str) -> dict[str, int]:
    """Return the numbers of the calls that are allowed, by name.

    Args:
        machine: as of `platform.machine()`.

    >>> call_numbers("aarch64")["read"]
    63
    """
    column = 1 if machine == "x86_64" else 2
    rows = [row.split() for row in CALLS.replace("\n", " ").split(";") if row.strip()]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def build_filter(machine: str, allowed: Allowed, own_pid: int) -> bytes:
    """Return the program that the kernel runs at each call.

    Args:
        machine: as of `platform.machine()`: `x86_64` or `aarch64`.
        allowed: what need not be refused.
        own_pid: of the process, which it may signal in any case.
    """
    numbers = call_numbers(machine)
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCH_OFFSET),
        (EQUAL, 1, 0, AUDIT_ARCHS[machine]),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, 0),
        (AT_LEAST, 0, 1, X32_BIT),
        (RETURN, 0, 0, KILL_PROCESS),
    ]
    checks = _checks(allowed, own_pid)
    for name, number in numbers.items():
        if name in METADATA_CALLS and not allowed.metadata:
            continue
        body = checks.get(name, [(RETURN, 0, 0, ALLOW)])
        program += [(EQUAL, 0, len(body), number), *body]
    refusal = ERRNO | errno.EPERM
    # libraries have another way where the kernel is too old for a call, and none if it is refused
    program += [
        (AT_LEAST, 0, 1, max(numbers.values()) + 1),
        (RETURN, 0, 0, ERRNO | errno.ENOSYS),
        (RETURN, 0, 0, refusal),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _checks(allowed: Allowed, own_pid: int) -> dict[str, list[Instruction]]:
    """Return what is run for calls of which the arguments decide."""
    truncating = {name: _opens(place) for name, place in (("open", 1), ("openat", 2))}
    pids = (own_pid,)
    signals = {} if allowed.signals else {name: _one_of(0, pids) for name in SIGNAL_CALLS}
    return (
        truncating
        | signals
        | {
            "clone": _without(0, NAMESPACE_FLAGS | CLONE_PARENT),
            "clone3": [(RETURN, 0, 0, ERRNO | errno.ENOSYS)],  # its flags are in memory
            "fcntl": _none_of(1, FCNTL_REFUSED),
            "ioctl": _one_of(1, IOCTL_ALLOWED),
            "prctl": _one_of(0, PRCTL_ALLOWED),
            "prlimit64": _one_of(0, (0,)),  # of itself
            "sendto": _no_address(4),
            "socketpair": _stream_pairs(),
        }
    )


def _argument(place: int, *, high: bool = False) -> Instruction:
    return (LOAD, 0, 0, ARGUMENTS_OFFSET + 8 * place + 4 * high)


def _verdict() -> list[Instruction]:
    """Return the two ends of a check: refused, and behind it allowed."""
    return [(RETURN, 0, 0, ERRNO | errno.EPERM), (RETURN, 0, 0, ALLOW)]


def _one_of(place: int, values: Sequence[int]) -> list[Instruction]:
    count = len(values)
    tests = [(EQUAL, count - i, 0, value & 0xFFFFFFFF) for i, value in enumerate(values)]
    return [_argument(place), *tests, *_verdict()]


def _none_of(place: int, values: Sequence[int]) -> list[Instruction]:
    count = len(values)
    tests = [(EQUAL, count - i, 0, value) for i, value in enumerate(values)]
    refused, passed = _verdict()
    return [_argument(place), *tests, passed, refused]


def _without(place: int, flags: int) -> list[Instruction]:
    return [_argument(place), (AND, 0, 0, flags), (EQUAL, 1, 0, 0), *_verdict()]


def _no_address(place: int) -> list[Instruction]:
    high = _argument(place, high=True)
    return [_argument(place), (EQUAL, 0, 2, 0), high, (EQUAL, 1, 0, 0), *_verdict()]


def _opens(place: int) -> list[Instruction]:
    """Refuse to empty a file that is not opened to be written, which old Landlocks let pass."""
    refused, passed = _verdict()
    return [
        _argument(place),
        (AND, 0, 0, O_TRUNC | O_ACCMODE),
        (EQUAL, 2, 0, O_TRUNC),
        (EQUAL, 1, 0, O_TRUNC | O_ACCMODE),
        passed,
        refused,
    ]


def _stream_pairs() -> list[Instruction]:
    """Allow pairs that can have no other end; datagrams can be sent anywhere."""
    return [
        _argument(0),
        (EQUAL, 0, 3, AF_UNIX),
        _argument(1),
        (AND, 0, 0, 0xFFFFFFFF ^ SOCK_FLAGS),
        (EQUAL, 1, 0, SOCK_STREAM),
        *_verdict(),
    ]


def install_filter(allowed: Allowed, own_pid: int) -> None:
    """Filter the calls of this thread from now on, and of all it starts; there is no way back.

    Raises:
        OSError: the kernel has no such filters, or this process may not set one.
    """
    program = build_filter(platform.machine(), allowed, own_pid)
    instructions = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))

    libc = ctypes.CDLL(None, use_errno=True)
    pointer = Program(len(program) // 8, ctypes.addressof(instructions))
    number = SYS_SECCOMP[platform.machine()]
    arguments = (ctypes.c_long(SECCOMP_SET_MODE_FILTER), ctypes.c_long(0), ctypes.byref(pointer))
    if libc.syscall(ctypes.c_long(number), *arguments) != 0:
        raise OSError(ctypes.get_errno(), "can't filter system calls")
