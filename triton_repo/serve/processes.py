"""Processes and shared memory of one server run, read from /proc."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
LIVING = "RSDTtIPKW"
"""States of /proc/<pid>/stat of a process that has not ended."""

_LIBC = ctypes.CDLL(None)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans, so that it can reap them."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """In a new child: get SIGTERM when the parent dies, however it dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def limit_stack(size: int) -> None:
    """In a new child: the size of new threads' stacks, or the most that is allowed. Memory is
    taken only as far as it is used."""
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    if hard != resource.RLIM_INFINITY:
        size = min(size, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (size, hard))


def group_members(group: int, states: str = LIVING) -> list[int]:
    """Processes of a process group: those that live, or "Z" those that died and were not reaped."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if is_member(pid, group, states)]


def is_member(pid: int, group: int, states: str = LIVING) -> bool:
    """Whether process `pid` belongs to `group` and is in one of `states`."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return int(fields[2]) == group and fields[0] in states


def model_processes(group: int, repository: Path) -> dict[int, str]:
    """The processes in `group` that run a model of `repository`, and which one."""
    found = {}
    for pid in group_members(group):
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        for argument in arguments:
            path = Path(argument)
            if path.name == "model.py" and repository in path.parents:
                found[pid] = path.relative_to(repository).parts[0]
    return found


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
