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


def test_other_architectures_and_x32_are_killed_and_what_is_not_named_is_refused(machine):
    program, arch = build_filter(machine, ALL, OWN_PID), AUDIT_ARCHS[machine]
    others = {*AUDIT_ARCHS.values(), 0x40000003, 0xC00000F3} - {arch}
    assert {verdict(program, other, 0) for other in others} == {KILLED}
    assert verdict(program, arch, 0x40000000) == KILLED
    named = set(call_numbers(machine).values())
    said = {number: verdict(program, arch, number) for number in {*range(1000)} - named}
    assert set(said.values()) == {REFUSED, UNKNOWN}
    assert {n for n, v in said.items() if v == UNKNOWN} == {*range(max(named) + 1, 1000)}


LAYERS = {  # and what becomes of signals and of files' metadata
    Layers(7, True, False): (ALLOW, ALLOW),
    Layers(7, False, False): (ALLOW, REFUSED),  # without namespaces
    Layers(1, False, False): (REFUSED, REFUSED),  # beside others
}


def test_what_is_named_is_allowed_as_far_as_its_arguments_are(machine):
    numbers = call_numbers(machine)
    cases = [
        *(("read", (), ALLOW), ("clone3", (), UNKNOWN)),
        ("clone", (0x00D0F00 | 17,), ALLOW),  # a thread
        *(("clone", (flags,), REFUSED) for flags in (0x10000000, 0x8000)),
        *(("prctl", (15,), ALLOW), ("prctl", (1,), REFUSED)),
        *(("prlimit64", (0,), ALLOW), ("prlimit64", (OWN_PID + 1,), REFUSED)),
        *(("socketpair", (1, kind), ALLOW) for kind in (1, 1 | 0o2000000)),
        *(("socketpair", kinds, REFUSED) for kinds in ((1, 2), (2, 1))),
        ("sendto", (5, 1, 1, 0, 0), ALLOW),
        *(("sendto", (5, 1, 1, 0, to), REFUSED) for to in (1, 1 << 32)),
        *(("fcntl", (1, 3), ALLOW), ("fcntl", (1, 8), REFUSED), ("fcntl", (1, 10), REFUSED)),
        *(("ioctl", (1, 0x541B), ALLOW), ("ioctl", (1, 0x5412), REFUSED)),
        ("openat", (3, 0, os.O_WRONLY | os.O_TRUNC), ALLOW),
        *(("openat", (3, 0, mode | os.O_TRUNC), REFUSED) for mode in (os.O_RDONLY, 3)),
        *(("openat", (3, 0, os.O_RDONLY), ALLOW), ("kill", (OWN_PID,), ALLOW)),
    ]
    for layers, (signals, metadata) in LAYERS.items():
        program = build_filter(machine, layers, OWN_PID)
        mine = [("kill", (1,), signals), ("tgkill", (-1,), signals)]
        mine += [("fchmod", (1,), metadata), ("utimensat", (1,), metadata)]
        for call, arguments, expected in (*cases, *mine):
            said = verdict(program, AUDIT_ARCHS[machine], numbers[call], arguments)
            assert said == expected, (layers, call, arguments)


def test_what_could_reach_others_is_not_named(machine):
    reaching = {
        *("ptrace", "mount", "unshare", "setns", "bpf", "perf_event_open", "io_uring_setup"),
        *("keyctl", "socket", "connect", "bind", "process_vm_readv", "setuid", "capset", "chroot"),
        *("memfd_create", "shmget", "mq_open", "pidfd_open", "execveat", "truncate", "setxattr"),
    }
    assert not reaching & call_numbers(machine).keys()
