"""NCCL through ctypes: the communicator of a tensor-parallel group whose ranks are processes."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

from m3trt.runtime.tensorrt.memory import import_torch
from m3trt.runtime.tensorrt.step_context import DeviceError


class UniqueId(ctypes.Structure):
    """ncclUniqueId: what the ranks of one group find each other by."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


def load_nccl() -> ctypes.CDLL:
    """The NCCL that torch has loaded, which is also the one that the plugins open.

    Raises:
        DeviceError: there is none.
    """
    import_torch()
    try:
        nccl = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise DeviceError(
            f"a tensor-parallel engine needs NCCL, and libnccl.so.2 cannot be opened ({error}):"
            " install a CUDA build of torch, or put NCCL's folder on LD_LIBRARY_PATH"
        ) from error
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    return nccl


def unique_id() -> bytes:
    """The id of a new group: one rank makes it, all pass it to `Communicator`."""
    nccl, made = load_nccl(), UniqueId()
    check(nccl, "ncclGetUniqueId", nccl.ncclGetUniqueId(ctypes.byref(made)))
    return bytes(made)


def check(nccl: ctypes.CDLL, call: str, status: int) -> None:
    if status:
        text = nccl.ncclGetErrorString(status).decode()
        raise DeviceError(f"{call} failed: {text}; NCCL_DEBUG=WARN shows more")


class Communicator:
    """This process's rank in a group of `size`, known to the plugin library until it is closed.

    Waits until all ranks have come. Uses the current GPU, another one on each rank.

    Raises:
        DeviceError: NCCL is missing or the group cannot be made.
    """

    def __init__(self, size: int, rank: int, group: bytes, plugin_library: Path) -> None:
        self._nccl = load_nccl()
        self._size = size
        self._plugins = ctypes.CDLL(str(plugin_library))
        self._lock = threading.Lock()
        self.handle = ctypes.c_void_p()
        """The ncclComm_t."""
        status = self._nccl.ncclCommInitRank(
            ctypes.byref(self.handle), size, UniqueId.from_buffer_copy(group), rank
        )
        check(self._nccl, f"ncclCommInitRank of rank {rank} of {size}", status)
        self._plugins.m3_set_communicator(size, self.handle)

    def abort(self) -> None:
        """Make steps that wait for another rank end, with rubbish; from any thread."""
        self._end(self._nccl.ncclCommAbort)

    def close(self) -> None:
        """Leave the group. No captured step may be left."""
        self._end(self._nccl.ncclCommDestroy)

    def _end(self, how: ctypes._NamedFuncPointer) -> None:
        with self._lock:
            handle, self.handle = self.handle, ctypes.c_void_p()
        if handle:
            self._plugins.m3_set_communicator(self._size, None)
            how(handle)
