"""The filter denies what reaches beyond a process, by the numbers of each kind of processor."""

import errno
import re
from pathlib import Path

import pytest

from lacuna.rollout.call_filter import _DENIED, _DENIED_VALUES, _MACHINES, _OWN_ONLY, call_filter

OWN = 4321
ALLOWED = 0x7FFF0000
ENDED = 0x80000000
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def answer(machine: str, call: int, *arguments: int, kind: int | None = None) -> int:
    """What the kernel would answer to a call, by following the filter as it does."""
    name = _MACHINES[machine][0] if kind is None else kind
    data = {0: call, 4: name} | {16 + 8 * n: value for n, value in enumerate(arguments)}
    program = call_filter(machine)
    place = loaded = 0
    while True:
        code, jump, other, number = program[place]
        number = OWN if number == "own" else number
        assert isinstance(number, int)
        if code == 0x06:
            return number
        if code == 0x20:
            loaded = data.get(number, 0)
            place += 1
            continue
        holds = {0x15: loaded == number, 0x25: loaded > number, 0x45: bool(loaded & number)}[code]
        place += 1 + (jump if holds else other)


@pytest.mark.parametrize("machine", [*_MACHINES])
def test_calls_are_denied_by_their_numbers_and_arguments(machine: str) -> None:
    at = _MACHINES[machine][1]
    denied = 0x00050000 | errno.EPERM
    for numbers in _DENIED.values():
        number = numbers[at]
        assert number is None or answer(machine, number) == denied
    harmless = {"read": (0, 63), "write": (1, 64), "mmap": (9, 222), "futex": (202, 98)}
    for pair in harmless.values():
        assert answer(machine, pair[at], 1, 2, 3) == ALLOWED
    for pair, argument, values in _DENIED_VALUES.values():
        before = [7] * argument
        assert answer(machine, pair[at], *before, 2, 3) == ALLOWED
        assert {answer(machine, pair[at], *before, value) for value in values} == {denied}
    kill, limit = (pair[at] for pair, _ in _OWN_ONLY.values())
    assert answer(machine, kill, OWN, OWN, 6) == ALLOWED
    assert answer(machine, kill, OWN + 1, OWN + 1, 9) == denied
    assert answer(machine, limit, 0) == ALLOWED and answer(machine, limit, OWN + 1) == denied
    clone = (56, 220)[at]
    assert answer(machine, clone, 0x3D0F00) == ALLOWED, "a thread"
    assert answer(machine, clone, 0x1200011) == denied, "a process"
    assert answer(machine, 435) == answer(machine, 500) == 0x00050000 | errno.ENOSYS
    assert answer(machine, 0x40000000 + 1) == 0x00050000 | errno.ENOSYS, "x32's calls"
    assert answer(machine, 1, kind=0x40000003) == ENDED, "another machine's calls"


@pytest.mark.parametrize("machine", [*_MACHINES])
def test_numbers_are_those_of_the_system(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip("this system has no headers of the kernel")
    text = HEADERS[machine].read_text()
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)
    system = {name: int(number) for name, number in found}
    at = _MACHINES[machine][1]
    others = {name: pair for name, (pair, *_) in (_DENIED_VALUES | _OWN_ONLY).items()}
    for name, numbers in (_DENIED | others).items():
        newer = name in ("fchmodat2", "setxattrat", "removexattrat")
        assert system.get(name, numbers[at] if newer else None) == numbers[at], name
