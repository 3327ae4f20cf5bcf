"""Runs code that nobody trusts: a program of its own, which shuts itself in before it begins.

It is started by `rollout/sandbox.py` and imports nothing of lacuna: what it needs is in its job.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Set
from fractions import Fraction
from numbers import Number
from types import ModuleType
from typing import Any

_OWN_MODULE = "solution"

# Numbers of Linux: calls and arguments of prctl (linux/prctl.h), and of Landlock on all machines.
_DIES_WITH_PARENT, _NO_NEW_PRIVILEGES, _FILTER_CALLS, _BY_FILTER = 1, 38, 22, 2
_MAKE_RULES, _ADD_RULE, _OBEY_RULES = 444, 445, 446
_CAPABILITIES_VERSION = 0x20080522

# Rights of Landlock: what there is of them by version, all for reading, and those in the folder.
_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}
_READING = 0b1100  # files and folders
_READING_A_FILE = 0b0100
_USING_A_DEVICE = 0b0110
_OWN_FOLDER = 0x4000 | 0b1_0010_1110  # read, write, make, truncate and remove files; no folders
_SIGNALS_AND_SOCKETS = 3


def shut_in(job: dict[str, Any]) -> list[str]:
    """Gives up, for ever, what the code must not have; what could not be given up, in words."""
    missing = []
    if not _limit(job["limits"]):
        missing.append("its memory")
    if sys.platform != "linux":
        return [*missing, "files", "network, processes and signals"]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    libc.prctl(_DIES_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != job["parent"]:
        os._exit(1)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if not _guard_files(libc, job["readable"], job["devices"]):
        missing.append("files")
    libc.capset(struct.pack("Ii", _CAPABILITIES_VERSION, 0), bytes(24))
    if not _filter_calls(libc, job["filter"]):
        missing.append("network, processes and signals")
    return missing


def _limit(limits: dict[str, int]) -> bool:
    """Sets limits of resources, the memory last; whether all are kept."""
    try:
        for name, value in limits.items():
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            most = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (most, most))
    except (AttributeError, ValueError, OSError):
        return False
    return True


def _guard_files(libc: ctypes.CDLL, readable: list[str], devices: list[str]) -> bool:
    """Lets the process open only these files and folders, and the one that it is in."""
    version = libc.syscall(_MAKE_RULES, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    rights = _RIGHTS[min(version, max(_RIGHTS))]
    scope = _SIGNALS_AND_SOCKETS if version >= 6 else 0
    wanted = struct.pack("QQQ", rights, 0, scope)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = libc.syscall(_MAKE_RULES, wanted, ctypes.c_size_t(len(wanted)), 0)
    if rules < 0:
        return False
    given = [(path, _READING if os.path.isdir(path) else _READING_A_FILE) for path in readable]
    given += [(path, _USING_A_DEVICE) for path in devices]
    for path, own in [*given, (".", _OWN_FOLDER)]:
        if os.path.exists(path):
            place = os.open(path, os.O_PATH)
            rule = struct.pack("=Qi", own & rights, place)
            if libc.syscall(_ADD_RULE, rules, 1, rule, 0):
                return False
            os.close(place)
    is_kept = libc.syscall(_OBEY_RULES, rules, 0) == 0
    os.close(rules)
    return bool(is_kept)


def _filter_calls(libc: ctypes.CDLL, instructions: list[list[Any]]) -> bool:
    """Lets the process make only those system calls that the filter allows."""
    if not instructions:
        return False
    packed = b"".join(
        struct.pack("HBBI", code, jump, other, os.getpid() if number == "own" else number)
        for code, jump, other, number in instructions
    )
    place = ctypes.create_string_buffer(packed, len(packed))
    program = struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(place))
    filtered = ctypes.create_string_buffer(program, len(program))
    return bool(libc.prctl(_FILTER_CALLS, _BY_FILTER, ctypes.addressof(filtered), 0, 0) == 0)


def plain(value: Any) -> list[Any]:
    """A value of Python's own types as JSON that keeps the types.

    Raises `TypeError` for other values: what a class of the code says of itself is not asked.
    """
    if value is None or isinstance(value, bool):
        return ["constant", value]
    if isinstance(value, int):
        return ["int", hex(value)]
    if isinstance(value, float):
        return ["float", float(value).hex()]
    if isinstance(value, complex):
        return ["complex", [value.real.hex(), value.imag.hex()]]
    if isinstance(value, str):
        return ["str", str(value)]
    if isinstance(value, bytes | bytearray):
        return ["bytes", value.hex()]
    if isinstance(value, tuple | list):
        return ["tuple" if isinstance(value, tuple) else "list", [plain(one) for one in value]]
    if isinstance(value, dict):
        return ["dict", [[plain(key), plain(one)] for key, one in value.items()]]
    if isinstance(value, Set):
        return ["set", [plain(one) for one in value]]
    if hasattr(value, "tolist"):  # arrays, and numbers of arrays
        return plain(value.tolist())
    if isinstance(value, Number):
        exact = Fraction(value)  # type: ignore[call-overload]
        return ["fraction", [hex(exact.numerator), hex(exact.denominator)]]
    raise TypeError(f"{type(value).__name__} is no plain value")


def _test(job: dict[str, Any]) -> None:
    """Runs the program as a module, and then its tests in that; tells what each gives."""
    told = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    mark, parts = job["mark"], job["parts"]
    module = ModuleType(_OWN_MODULE)
    sys.modules[_OWN_MODULE] = module
    names = vars(module)
    exec(compile(job["program"], "<completion>", "exec"), names)
    for number, (kind, source) in enumerate(parts):
        try:
            code = compile(source, "<test>", "eval" if kind == "value" else "exec")
            said = json.dumps([mark, number, plain(eval(code, names))])
        except BaseException:  # whatever the code does, the next test is another one
            continue
        os.write(told, said.encode() + b"\n")


def _begin(job_file: int, ready: int) -> None:
    with open(job_file, encoding="utf-8") as file:
        job = json.load(file)
    missing = shut_in(job)
    os.write(ready, json.dumps(missing).encode())
    os.close(ready)
    sys.argv = [""]
    if missing and not job["unprotected"]:
        os._exit(1)
    if "parts" in job:
        try:
            _test(job)
        finally:
            os._exit(0)
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(job["program"], "<completion>", "exec"), vars(module))


if __name__ == "__main__":
    _begin(int(sys.argv[1]), int(sys.argv[2]))
