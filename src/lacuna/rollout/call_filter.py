"""Which system calls a shut-in process must not make, as the filter that Linux takes."""

import errno
import platform

# Machine -> how the kernel calls its system calls (linux/audit.h), and its place in the rows below.
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# The number of a call on x86_64 and on aarch64, None where there is no such call: those by which a
# process reaches a network, other processes, or files that Landlock does not guard.
_DENIED = {
    "socket": (41, 198),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "unshare": (272, 97),
    "setns": (308, 268),
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "semget": (64, 190),
    "semctl": (66, 191),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "truncate": (76, 45),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "link": (86, None),
    "linkat": (265, 37),
    "mknod": (133, None),
    "mknodat": (259, 33),
}

# Calls that are denied for some values of an argument: its place and the values. They make signals
# of an open file go to another process, write to a terminal, or outlive the trainer.
_DENIED_VALUES = {
    "fcntl": ((72, 25), 1, (8, 15)),  # F_SETOWN, F_SETOWN_EX
    "ioctl": ((16, 29), 1, (0x8901, 0x8902, 0x5412)),  # FIOSETOWN, SIOCSPGRP, TIOCSTI
    "prctl": ((157, 167), 0, (1,)),  # PR_SET_PDEATHSIG
}
# Calls whose first argument must be one of these: of itself only.
_OWN_ONLY: dict[str, tuple[tuple[int, int], int | str]] = {
    "tgkill": ((234, 131), "own"),
    "prlimit64": ((302, 261), 0),
}
_CLONE = (56, 220)
_CLONE3 = 435
_THREAD = 0x10000  # CLONE_THREAD
_NEWEST = 466  # calls with larger numbers are not known here

# struct seccomp_data: the number, the machine, the place of the code, six arguments of 8 bytes.
_NUMBER, _MACHINE, _ARGUMENTS = 0, 4, 16
_LOAD, _EQUAL, _ABOVE, _HAS_BITS, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

Instruction = tuple[int, int, int, int | str]
"""A code of classic BPF, what is skipped where it holds and where not, and its number.

The number "own" is the number of the process that is shut in.
"""


def call_filter(machine: str = platform.machine()) -> list[Instruction]:
    """The filter of system calls for this machine; empty where it is not known."""
    if machine not in _MACHINES:
        return []
    name, place = _MACHINES[machine]
    denied = _ERRNO | errno.EPERM
    filtered: list[Instruction] = [
        (_LOAD, 0, 0, _MACHINE),
        (_EQUAL, 1, 0, name),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_ABOVE, 0, 1, _NEWEST),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        # Libraries use clone where there is no clone3, whose flags a filter cannot see.
        (_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    for numbers in _DENIED.values():
        number = numbers[place]
        if number is not None:
            filtered += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, denied)]
    for numbers_of_call, argument, values in _DENIED_VALUES.values():
        tests: list[Instruction] = []
        for value in values:
            tests += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, denied)]
        filtered += _with_argument(numbers_of_call[place], argument, tests)
    for numbers_of_call, own in _OWN_ONLY.values():
        tests = [(_EQUAL, 1, 0, own), (_RETURN, 0, 0, denied)]
        filtered += _with_argument(numbers_of_call[place], 0, tests)
    tests = [(_HAS_BITS, 1, 0, _THREAD), (_RETURN, 0, 0, denied)]
    filtered += _with_argument(_CLONE[place], 0, tests)
    return [*filtered, (_RETURN, 0, 0, _ALLOW)]


def _with_argument(number: int, argument: int, tests: list[Instruction]) -> list[Instruction]:
    """Tests of the lower half of an argument of one call, which is all that these calls take."""
    return [
        (_EQUAL, 0, len(tests) + 2, number),
        (_LOAD, 0, 0, _ARGUMENTS + 8 * argument),
        *tests,
        (_LOAD, 0, 0, _NUMBER),
    ]
