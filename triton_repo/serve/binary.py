"""Finds the server binary and what it needs to start models in our environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

REPOSITORY_ROOT = Path(__file__).resolve().parents[2]
SERVER = REPOSITORY_ROOT / ".venv" / "server"
LIBPYTHON = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
_WHEEL = "lib/python3.*/site-packages/pytriton/tritonserver/bin/tritonserver"
_SAFE = "./_+:@%,=-"


class ServeError(RuntimeError):
    """The server cannot be started or kept running; the text says what to do."""


def check_path(what: str, path: Path, *, shell: bool) -> None:
    """Refuse a path that model processes cannot use: Python names files in ASCII there, and those
    that start the process go through a `shell`.

    Raises:
        ServeError: names the characters.
    """
    safe = [char.isascii() and (not shell or char.isalnum() or char in _SAFE) for char in str(path)]
    if wrong := sorted({char for char, ok in zip(str(path), safe, strict=True) if not ok}):
        expected = f"ASCII letters, digits and {_SAFE}" if shell else "ASCII"
        raise ServeError(
            f"{what} {path} holds {wrong}, expected {expected}: Triton's model processes cannot"
            " use it. Choose another path"
        )


def find_tritonserver(given: Path | None) -> Path:
    """`given`, else that of `.venv/server`, else the one on PATH (as in Triton's containers).

    Raises:
        ServeError: there is none.
    """
    if given is not None:
        if not os.access(given, os.X_OK):
            raise ServeError(f"--tritonserver {given} is no executable file")
        return given.resolve()
    wheel = sorted(SERVER.glob(_WHEEL))
    if wheel:
        return wheel[-1]
    found = shutil.which("tritonserver")
    if found is None:
        raise ServeError(
            f"no tritonserver in {SERVER} or on PATH: run `make setup`"
            " or name one with --tritonserver"
        )
    return Path(found).resolve()


def backend_flags(tritonserver: Path) -> list[str]:
    """Where the backends are, for a binary that was unpacked from a wheel; none elsewhere.

    Links the stub of this Python version to where the backend looks for it.

    Raises:
        ServeError: the wheel has no stub for this Python.
    """
    root = tritonserver.parents[1]
    stubs = root / "python_backend_stubs"
    if not stubs.is_dir():
        return []
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    target = Path("..", "..", "python_backend_stubs", version, "triton_python_backend_stub")
    link = root / "backends" / "python" / "triton_python_backend_stub"
    if not (link.parent / target).exists():
        known = sorted(path.name for path in stubs.iterdir())
        raise ServeError(f"this is Python {version}, {stubs} has stubs for {known} only")
    if not link.is_symlink() or link.readlink() != target:
        temporary = link.with_name(f"{link.name}.{os.getpid()}")
        temporary.symlink_to(target)
        temporary.replace(link)
    return [f"--backend-directory={root / 'backends'}"]


def model_environment() -> dict[str, str]:
    """Environment in which the server's model processes use this interpreter's packages.

    A model process finds its environment by the `python3` on PATH and needs the shared library of
    the same interpreter. NumPy gets one thread a process unless OPENBLAS_NUM_THREADS says
    otherwise: several processes with spinning threads starve each other.
    """
    environment = dict(os.environ)
    binaries = str(Path(sys.prefix) / "bin")
    environment["PATH"] = os.pathsep.join([binaries, environment.get("PATH", os.defpath)])
    libraries = [sysconfig.get_config_var("LIBDIR"), str(SERVER / "libpython")]
    found = [path for path in libraries if path and Path(path, LIBPYTHON).exists()]
    if paths := [*found[:1], *filter(None, [environment.get("LD_LIBRARY_PATH")])]:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")
    environment.pop("PYTHONHOME", None)
    return environment


def check_stub(tritonserver: Path) -> None:
    """Check that a stub which lies beside the server can start: the server itself would wait.

    Raises:
        ServeError: a library is missing.
    """
    stub = tritonserver.parents[1] / "backends" / "python" / "triton_python_backend_stub"
    if not stub.exists():
        return
    result = subprocess.run([stub], capture_output=True, text=True, env=model_environment())
    if "error while loading shared libraries" in result.stderr:
        raise ServeError(
            f"{result.stderr.strip()}\nFor {LIBPYTHON} run triton_repo/fetch_libpython.sh, or"
            " install the system's package of it (Debian: libpython3.x)"
        )
