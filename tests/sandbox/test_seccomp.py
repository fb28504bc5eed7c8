"""The filter of system calls, run by an interpreter of the kernel's language for filters."""

import errno
import os
import struct

import pytest

from jaxrl_llm.sandbox.jail import ALLOW, AUDIT_ARCHS, Layers, build_filter, call_numbers

KILLED = 0x80000000
REFUSED, UNKNOWN = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
ALL = Layers(7, True, False)
OWN_PID = 77


def verdict(program, arch, number, arguments=()):
    """Return what a filter says, as linux/bpf_common.h defines its instructions."""
    words = [a & 0xFFFFFFFFFFFFFFFF for a in (*arguments, *[0] * (6 - len(arguments)))]
    data = struct.pack("=IIQ6Q", number, arch, 0, *words)
    instructions = list(struct.iter_unpack("=HBBI", program))
    place = accumulator = 0
    while True:
        code, yes, no, operand = instructions[place]
        place += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            accumulator = struct.unpack_from("=I", data, operand)[0]
        elif code == 0x54:
            accumulator &= operand
        else:
            holds = {0x15: accumulator == operand, 0x35: accumulator >= operand}[code]
            place += yes if holds else no


@pytest.fixture(scope="module", params=["x86_64", "aarch64"])
def machine(request):
    return request.param


@pytest.fixture(
    scope="module",
    params=[
        (Layers(7, True, False), ALLOW, ALLOW),
        (Layers(7, False, False), ALLOW, REFUSED),
        (Layers(1, False, False), REFUSED, REFUSED),
    ],
    ids=["apart", "without namespaces", "beside others"],
)
def judged(request, machine):
    """Return what judges a call, and what becomes of signals and of files' metadata."""
    layers, *verdicts = request.param
    program = build_filter(machine, layers, OWN_PID)
    numbers = call_numbers(machine)

    def judge(call, *arguments):
        return verdict(program, AUDIT_ARCHS[machine], numbers[call], arguments)

    return judge, *verdicts


def test_other_architectures_and_x32_are_killed(machine):
    program = build_filter(machine, ALL, OWN_PID)
    others = {*AUDIT_ARCHS.values(), 0x40000003, 0xC00000F3} - {AUDIT_ARCHS[machine]}
    assert {verdict(program, arch, 0) for arch in others} == {KILLED}
    assert verdict(program, AUDIT_ARCHS[machine], 0x40000000) == KILLED


def test_what_is_not_named_is_refused(machine):
    program, arch = build_filter(machine, ALL, OWN_PID), AUDIT_ARCHS[machine]
    named = set(call_numbers(machine).values())
    said = {number: verdict(program, arch, number) for number in {*range(1000)} - named}
    assert set(said.values()) == {REFUSED, UNKNOWN}
    assert {n for n, v in said.items() if v == UNKNOWN} == {*range(max(named) + 1, 1000)}


def test_what_is_named_is_allowed_as_far_as_its_arguments_are(judged):
    judge, signals, metadata = judged
    cases = [
        ("read", (), ALLOW),
        ("clone", (0x00D0F00 | 17,), ALLOW),  # a thread
        ("clone", (0x10000000,), REFUSED),
        ("clone", (0x8000,), REFUSED),
        ("clone3", (), UNKNOWN),
        ("prctl", (15,), ALLOW),
        ("prctl", (1,), REFUSED),
        ("prlimit64", (0,), ALLOW),
        ("prlimit64", (OWN_PID + 1,), REFUSED),
        ("socketpair", (1, 1), ALLOW),
        ("socketpair", (1, 1 | 0o2000000), ALLOW),
        ("socketpair", (1, 2), REFUSED),
        ("socketpair", (2, 1), REFUSED),
        ("sendto", (5, 1, 1, 0, 0), ALLOW),
        ("sendto", (5, 1, 1, 0, 1), REFUSED),
        ("sendto", (5, 1, 1, 0, 1 << 32), REFUSED),
        ("fcntl", (1, 3), ALLOW),
        ("fcntl", (1, 8), REFUSED),
        ("fcntl", (1, 10), REFUSED),
        ("ioctl", (1, 0x541B), ALLOW),
        ("ioctl", (1, 0x5412), REFUSED),
        ("openat", (3, 0, os.O_WRONLY | os.O_TRUNC), ALLOW),
        ("openat", (3, 0, os.O_RDONLY | os.O_TRUNC), REFUSED),
        ("openat", (3, 0, 3 | os.O_TRUNC), REFUSED),
        ("openat", (3, 0, os.O_RDONLY), ALLOW),
        ("kill", (OWN_PID,), ALLOW),
        ("kill", (1,), signals),
        ("tgkill", (-1,), signals),
        ("fchmod", (1,), metadata),
        ("utimensat", (1,), metadata),
    ]
    said = [(call, arguments, judge(call, *arguments)) for call, arguments, _ in cases]
    assert said == cases


@pytest.mark.parametrize(
    "call",
    [
        "ptrace",
        "mount",
        "unshare",
        "setns",
        "bpf",
        "perf_event_open",
        "io_uring_setup",
        "userfaultfd",
        "keyctl",
        "add_key",
        "socket",
        "connect",
        "bind",
        "process_vm_readv",
        "kexec_load",
        "setuid",
        "setgid",
        "setresuid",
        "capset",
        "chroot",
        "pivot_root",
        "memfd_create",
        "shmget",
        "mq_open",
        "inotify_add_watch",
        "pidfd_open",
        "rt_sigqueueinfo",
        "setpriority",
        "truncate",
        "sched_setaffinity",
        "setxattr",
        "open_by_handle_at",
        "execveat",
        "personality",
        "seccomp",
    ],
)
def test_what_could_reach_others_is_not_named(machine, call):
    assert call not in call_numbers(machine)
