"""Finds the TensorRT library, the plugin library and the GPU, and says what they are."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUNTIMES = ("tensorrt", "tensorrt_rtx", "reference")
"""In the order in which `auto` looks for them; `reference` is NumPy and always there."""

PLUGIN_LIBRARY = Path(__file__).resolve().parents[1] / "out" / "libm3_plugins.so"
"""Where `make plugins` puts it."""

RTX_COMPUTE_CAPABILITIES = (80, 86, 89, 120)
"""What TensorRT-RTX builds for on a machine with no GPU: it runs on these (and on 121)."""


class LibraryError(RuntimeError):
    """A native library is missing, cannot be loaded or does not fit."""


@dataclass(frozen=True, slots=True)
class Library:
    """An importable TensorRT."""

    name: str
    version: str
    cuda: str | None


@dataclass(frozen=True, slots=True)
class PluginLibrary:
    """A built `libm3_plugins.so`."""

    path: Path
    version: str
    sha256: str


def resolve_runtime(runtime: str) -> str:
    """The first library of `RUNTIMES` that can be imported for `auto`, else `runtime` itself.

    Raises:
        LibraryError: `runtime` is unknown or cannot be imported.
    """
    if runtime == "auto":
        return next(name for name in RUNTIMES if _exists(name))
    if runtime not in RUNTIMES:
        raise LibraryError(f"runtime {runtime!r} is unknown, expected auto or one of {RUNTIMES}")
    if not _exists(runtime):
        found = [name for name in RUNTIMES if _exists(name)]
        raise LibraryError(
            f"{runtime} cannot be imported, found only {found}: pip install"
            f" {runtime.replace('_', '-')}, or choose another runtime"
        )
    return runtime


def describe(name: str) -> Library:
    """Version of library `name` and the CUDA major version that its wheel is made for."""
    if name == "reference":
        return Library(name, importlib.metadata.version("m3trt"), None)
    version = str(import_library(name).__version__)
    try:
        requirements = " ".join(importlib.metadata.requires(name) or ())
    except importlib.metadata.PackageNotFoundError:
        requirements = ""
    cuda = re.search(r"_cu(\d+)", requirements)
    return Library(name, version, cuda.group(1) if cuda else None)


def import_library(name: str) -> Any:
    """Import `tensorrt` or `tensorrt_rtx`, ready to parse ONNX files with plugins.

    Raises:
        LibraryError: the import fails, or the parser could not open the library.
    """
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise LibraryError(f"{name} is installed but cannot be imported: {error}") from error
    if name == "tensorrt_rtx":
        _link_rtx_library()
    return module


@functools.cache
def load_plugins(name: str, path: Path) -> Any:
    """Register the plugins at `path` with library `name` and return its registry.

    Once a process: the registry refuses creators that it has, even from the same file.

    Raises:
        LibraryError: the registry takes no plugins from this file.
    """
    registry = import_library(name).get_plugin_registry()
    if not registry.load_library(str(path)):
        raise LibraryError(
            f"{name} cannot load the plugins of {path} (or has loaded those of another file):"
            " run `make plugins` again"
        )
    return registry


def _link_rtx_library() -> None:
    """Give `libtensorrt_rtx.so.1` the name by which its own ONNX parser opens it.

    The wheel lacks that name, and the parser ends the process when it meets a plugin.
    """
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    libraries = [path for folder in folders for path in Path(folder).glob("libtensorrt_rtx.so.?")]
    if not libraries or libraries[0].with_name("libtensorrt_rtx.so").exists():
        return
    link = libraries[0].with_name("libtensorrt_rtx.so")
    try:
        temporary = link.with_name(f".{link.name}.{os.getpid()}")
        temporary.symlink_to(libraries[0].name)
        os.replace(temporary, link)
    except OSError as error:
        if not _can_open(link.name):
            raise LibraryError(
                f"{link} is missing and cannot be made ({error}), but TensorRT-RTX's ONNX parser"
                f" needs it: run `ln -s {libraries[0].name} {link}` with the rights to do so, or"
                f" put a link of that name into a folder of LD_LIBRARY_PATH"
            ) from error


def describe_plugins(path: Path) -> PluginLibrary:
    """Version and hash of a plugin library.

    Raises:
        LibraryError: it does not exist, cannot be loaded or is not ours.
    """
    if not path.is_file():
        raise LibraryError(f"plugin library {path} does not exist: run `make plugins`")
    try:
        version = ctypes.CDLL(str(path.resolve())).m3_plugins_version
    except (OSError, AttributeError) as error:
        raise LibraryError(f"{path} is not a plugin library of this project: {error}") from error
    version.restype = ctypes.c_char_p
    text = version()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return PluginLibrary(path.resolve(), text.decode(), digest)


def device_compute_capability() -> int | None:
    """Compute capability of GPU 0 as 10 * major + minor; None on a machine without one."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
        return None
    attribute_major, attribute_minor = 75, 76
    failed = cuda.cuDeviceGetAttribute(ctypes.byref(major), attribute_major, device)
    failed |= cuda.cuDeviceGetAttribute(ctypes.byref(minor), attribute_minor, device)
    return None if failed else 10 * major.value + minor.value


def _exists(name: str) -> bool:
    return name == "reference" or importlib.util.find_spec(name) is not None


def _can_open(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
