"""A small system-call filter, as the classic BPF program that bubblewrap loads.

Answers "not implemented" to calls that no graded program needs and that widen the wall: memory
that no limit counts (memfd), other processes' memory, kernel keys, new namespaces and mounts, and
interfaces with a history of kernel faults. Everything else is allowed.
"""

from __future__ import annotations

import functools
import platform
import struct

# name -> number on (x86_64, aarch64)
DENIED: dict[str, tuple[int, int]] = {
  "memfd_create": (319, 279),
  "memfd_secret": (447, 447),
  "ptrace": (101, 117),
  "process_vm_readv": (310, 270),
  "process_vm_writev": (311, 271),
  "add_key": (248, 217),
  "request_key": (249, 218),
  "keyctl": (250, 219),
  "bpf": (321, 280),
  "perf_event_open": (298, 241),
  "userfaultfd": (323, 282),
  "io_uring_setup": (425, 425),
  "unshare": (272, 97),
  "setns": (308, 268),
  "mount": (165, 40),
  "move_mount": (429, 429),
  "open_tree": (428, 428),
  "fsopen": (430, 430),
  "pivot_root": (155, 41),
  "mq_open": (240, 180),
  "shmget": (29, 194),
  "open_by_handle_at": (304, 265),
  "msgget": (68, 186),
  "semget": (64, 190),
  "io_setup": (206, 0),  # takes from a store that the whole machine shares
  "setsockopt": (54, 208),  # would enlarge buffers that no limit counts
  "sync": (162, 81),
  "syncfs": (306, 267),
  "clone3": (435, 435),  # its flags lie in memory, out of a filter's sight; libc then takes clone
}
_CLONE, _SOCKET, _PRLIMIT = (56, 220), (41, 198), (302, 261)
_NAMESPACES = 0x7E020080  # flags of clone that make one
_UNIX = 1  # the one family of sockets that may be had: those of others have larger buffers
_AUDIT = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _EQUAL, _AT_LEAST, _ANY, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_FIRST_ARGUMENT = 16
_ALLOW, _KILL, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000 | 38
_X32 = 0x40000000  # x86_64's second table of numbers, which would go around the list


@functools.cache
def program() -> bytes | None:
  """The filter, or None on an architecture whose numbers are not known."""
  machine = platform.machine()
  if machine not in _AUDIT:
    return None
  column, audit = _AUDIT[machine]
  numbers = sorted({row[column] for row in DENIED.values()})
  code = [
    (_LOAD, 0, 0, 4),  # the architecture of the call
    (_EQUAL, 1, 0, audit),
    (_RETURN, 0, 0, _KILL),
    (_LOAD, 0, 0, 0),  # its number
    (_AT_LEAST, 0, 1, _X32),
    (_RETURN, 0, 0, _ENOSYS),
  ]
  code += [
    # Of clone, socket and prlimit the first argument decides: none but one's own limits.
    (_EQUAL, 0, 3, _CLONE[column]),
    (_LOAD, 0, 0, _FIRST_ARGUMENT),
    (_ANY, len(numbers) + 10, 0, _NAMESPACES),
    (_RETURN, 0, 0, _ALLOW),
    (_EQUAL, 0, 3, _SOCKET[column]),
    (_LOAD, 0, 0, _FIRST_ARGUMENT),
    (_EQUAL, 0, len(numbers) + 6, _UNIX),
    (_RETURN, 0, 0, _ALLOW),
    (_EQUAL, 0, 3, _PRLIMIT[column]),
    (_LOAD, 0, 0, _FIRST_ARGUMENT),
    (_EQUAL, 0, len(numbers) + 2, 0),
    (_RETURN, 0, 0, _ALLOW),
  ]
  code += [(_EQUAL, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
  code += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ENOSYS)]
  return b"".join(struct.pack("<HBBI", *line) for line in code)
