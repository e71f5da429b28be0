"""The system-call filter, run instruction by instruction for both architectures, and once for real."""

import errno
import os
import re
import sys
from pathlib import Path

import pytest

from sandbox.layers import kernel, probe, seccomp, syscalls

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | 38
FORBIDDEN = {  # name: numbers on x86_64 and aarch64
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "socket": (41, 198),
    "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202), "sendmsg": (46, 211),
    "ptrace": (101, 117), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "keyctl": (250, 219), "add_key": (248, 217),
    "io_uring_setup": (425, 425), "userfaultfd": (323, 282), "perf_event_open": (298, 241), "setuid": (105, 146),
    "memfd_create": (319, 279), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "capset": (126, 91),
    "process_vm_readv": (310, 270), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "shmget": (29, 194),
    "init_module": (175, 105), "kexec_load": (246, 104), "personality": (135, 92), "seccomp": (317, 277),
    "open_by_handle_at": (304, 265), "mknodat": (259, 33), "fchownat": (260, 54), "mq_open": (240, 180),
}  # fmt: skip


def _run(machine: str, number: int, arguments=(), own_root=True, audit=None) -> int:
    words = {0: number, 4: AUDIT[machine] if audit is None else audit}
    for i in range(6):
        value = (arguments[i] if i < len(arguments) else 0) & (1 << 64) - 1
        words[16 + 8 * i], words[20 + 8 * i] = value & 0xFFFFFFFF, value >> 32
    program, at, loaded = seccomp.build(machine, own_root), 0, 0
    while True:
        code, jump_true, jump_false, constant = program[at]
        at += 1
        if code == 0x06:
            return constant
        if code == 0x20:
            loaded = words[constant]
        elif code == 0x05:
            at += constant
        else:
            holds = {0x15: loaded == constant, 0x35: loaded >= constant, 0x45: bool(loaded & constant)}[code]
            at += jump_true if holds else jump_false


@pytest.mark.parametrize("machine", syscalls.ARCHITECTURES)
def test_every_number_gets_the_table_s_answer(machine):
    allowed = set(syscalls.numbers(syscalls.ALLOWED, machine).values())
    metadata = set(syscalls.numbers(syscalls.METADATA, machine).values())
    conditional = set(syscalls.numbers(syscalls.CONDITIONAL, machine).values())
    assert len(allowed) > 140
    for number in set(range(600)) - conditional:
        assert _run(machine, number) == (ALLOW if number in allowed | metadata else EPERM)
        assert _run(machine, number, own_root=False) == (ALLOW if number in allowed else EPERM)


@pytest.mark.parametrize("machine", syscalls.ARCHITECTURES)
def test_what_starts_an_escape_is_refused(machine):
    for name, numbers in FORBIDDEN.items():
        number = numbers[syscalls.ARCHITECTURES[machine]]
        assert number is None or _run(machine, number) == EPERM, name


@pytest.mark.parametrize("machine", syscalls.ARCHITECTURES)
def test_conditional_calls_depend_on_their_arguments(machine):
    calls = syscalls.numbers(syscalls.CONDITIONAL, machine)
    pid, group = 0x7FFFFFF1, 0x7FFFFFF2  # the placeholders of an uninstalled filter

    def answer(name, *arguments):
        return _run(machine, calls[name], arguments)

    assert answer("clone", 0x3D0F00) == ALLOW  # a thread
    assert answer("clone", 0x01200011) == EPERM  # a fork
    assert answer("clone", 0x3D0F00 | 0x10000000) == EPERM  # a thread in a new user namespace
    assert answer("clone3") == ENOSYS
    assert [answer("kill", who, 9) for who in (pid, group, 0)] == [ALLOW] * 3
    assert [answer("kill", who, 9) for who in (1, -1, pid + 5)] == [EPERM] * 3
    assert (answer("tgkill", pid), answer("tgkill", 1)) == (ALLOW, EPERM)
    assert (answer("ioctl", 0, 0x5401), answer("ioctl", 0, 0x5412)) == (ALLOW, EPERM)  # TCGETS, TIOCSTI
    assert (answer("prctl", 15), answer("prctl", 1), answer("prctl", 22)) == (ALLOW, EPERM, EPERM)
    assert (answer("prlimit64", 0), answer("prlimit64", 7)) == (ALLOW, EPERM)
    assert (answer("socketpair", 1), answer("socketpair", 2)) == (ALLOW, EPERM)
    assert answer("sendto", 3, 0, 1, 0, 0) == ALLOW
    assert answer("sendto", 3, 0, 1, 0, 0x7000) == answer("sendto", 3, 0, 1, 0, 1 << 40) == EPERM


def test_another_architecture_and_x32_are_killed():
    assert _run("x86_64", 0, audit=0x40000003) == KILL
    assert _run("x86_64", 0x40000000) == KILL
    assert _run("aarch64", 63, audit=AUDIT["x86_64"]) == KILL


@pytest.mark.skipif(not Path("/usr/include/asm-generic/unistd.h").exists(), reason="no kernel headers")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="compares with the x86_64 header")
def test_the_numbers_are_those_of_the_kernel_headers():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h").read_text()
    named = {m[1]: int(m[2]) for m in re.finditer(r"#define __NR_(\w+) (\d+)", header)}
    generic = Path("/usr/include/asm-generic/unistd.h").read_text()
    arm = {m[1]: int(m[2]) for m in re.finditer(r"#define __NR(?:3264)?_(\w+) (\d+)", generic)}
    arm["newfstatat"] = arm["fstatat"]
    for table in (syscalls.ALLOWED, syscalls.METADATA, syscalls.CONDITIONAL):
        for machine, known in (("x86_64", named), ("aarch64", arm)):
            for name, number in syscalls.numbers(table, machine).items():
                assert known.get(name, number) == number, (machine, name)


@pytest.mark.skipif(not kernel.SUPPORTED, reason="needs Linux on x86_64 or aarch64")
def test_an_installed_filter_refuses_for_real_and_leaves_ordinary_calls():
    def attempt() -> list[str]:
        seccomp.SystemCallFilter(own_root=True).install(os.getpid())
        left = [name for name in ("/", sys.prefix) if not os.listdir(name)]
        os.kill(os.getpid(), 0)
        os.kill(0, 0)
        return left + probe._breaches_of_system_calls()

    assert probe.in_scratch_process(attempt) == []
