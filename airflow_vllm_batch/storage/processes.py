"""Name a process so that another one on the same machine can tell for certain that it is gone. Linux only.

A host name and a pid do not do: containers share names and each count pids from 1, and a pid is used again.
"""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")
_ENDED = " ended"


def own_identity() -> str | None:
    """Return boot, pid namespace, pid and start of this process; null where the system does not tell."""
    found = _identity(os.getpid())
    # A /proc of another namespace knows us by another pid.
    return None if found is None or found.endswith(_ENDED) else found


def is_gone(identity: str | None) -> bool:
    """Whether the process ended for certain; false also where that can't be seen from here."""
    here = own_identity()
    if identity is None or here is None or len(parts := identity.split()) != 4:
        return False
    if parts[:2] != here.split()[:2] or not parts[2].isdecimal():
        return False  # another machine, another boot or another container
    return _identity(int(parts[2])) != identity


def _identity(pid: int) -> str | None:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = (_PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return None
    try:
        # The name in brackets may hold spaces and brackets itself.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        state, start = fields[0], fields[19]
    except (OSError, IndexError):
        return f"{boot} {namespace} {pid}{_ENDED}"
    # A zombie has no thread left that could write anything.
    return f"{boot} {namespace} {pid}{_ENDED if state in {'Z', 'X'} else f' {start}'}"
