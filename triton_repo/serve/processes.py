"""Processes and shared memory of one server run, read from /proc."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections import Counter
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans, so that it can reap them."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """In a new child: get SIGTERM when the parent dies, however it dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def group_members(group: int) -> list[int]:
    """Living processes of a process group."""
    return [pid for pid, pgrp, state in _processes() if pgrp == group and state not in "ZX"]


def _processes() -> list[tuple[int, int, str]]:
    """(pid, process group, state) of every process."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found.append((int(entry), int(fields[2]), fields[0]))
    return found


def model_processes(group: int, repository: Path) -> Counter[str]:
    """How many processes each model of `repository` has in `group`."""
    counts: Counter[str] = Counter()
    for pid in group_members(group):
        try:
            arguments = Path("/proc", str(pid), "cmdline").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        for argument in arguments:
            path = Path(argument)
            if path.name == "model.py" and repository in path.parents:
                counts[path.relative_to(repository).parts[0]] += 1
                break
    return counts


def kill_group(group: int, timeout_s: float = 10.0) -> None:
    """SIGKILL a process group and wait until nothing of it is left."""
    deadline = time.monotonic() + timeout_s
    while group_members(group) and time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        time.sleep(0.05)


def reap(group: int, timeout_s: float = 5.0) -> None:
    """Collect the exit codes of dead children in `group`, adopted ones too. A dead process can
    only be collected after its last thread."""
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-group, os.WNOHANG) == (0, 0):
                time.sleep(0.02)


def remove_shared_memory(prefix: str) -> list[str]:
    """Remove the shared-memory files whose names begin with `prefix`; returns their names."""
    found = sorted(path for path in Path("/dev/shm").glob(f"{prefix}*"))
    for path in found:
        path.unlink(missing_ok=True)
    return [path.name for path in found]
