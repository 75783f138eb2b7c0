"""M3AllReduce and M3AllGather between the ranks of one process, one thread a rank."""

from __future__ import annotations

import threading

import numpy as np
from m3trt.runtime.reference.numerics import Array, round_to, to_float32
from m3trt.runtime.reference.op import M3Op
from onnx.reference.op_run import OpRun


class Communicator:
    """Lets `size` threads exchange arrays. All take part in every exchange, in the same order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size)
        self._posted: list[Array] = [np.empty(0)] * size

    def exchange(self, rank: int, x: Array) -> list[Array]:
        """Post x and return what every rank posted.

        Raises:
            threading.BrokenBarrierError: another rank called `abort`.
        """
        self._posted[rank] = x
        self._barrier.wait()
        posted = list(self._posted)
        self._barrier.wait()
        return posted

    def abort(self) -> None:
        """Wake the ranks that wait, now and in later exchanges, with BrokenBarrierError."""
        self._barrier.abort()

    def reset(self) -> None:
        """Make exchanges possible again after `abort`; no rank may be in one."""
        self._barrier.reset()


def collective_ops(communicator: Communicator, rank: int) -> list[type[OpRun]]:
    """The two collectives as seen by one rank.

    ONNX's evaluator makes the nodes itself from classes named as the op, so each rank gets classes
    of its own.
    """

    class _Collective(M3Op):
        fields = ("group_size",)

        def exchange(self, x: Array, group_size: int) -> list[Array]:
            if group_size != communicator.size:
                raise self.error(f"group_size {group_size}, this group has {communicator.size}")
            return communicator.exchange(rank, x)

    class M3AllReduce(_Collective):
        """x of any shape -> the sum over ranks: fp32, in rank order, one rounding."""

        def _run(self, x: Array, group_size: int) -> tuple[Array]:
            parts = self.exchange(x, group_size)
            total = np.zeros(x.shape, np.float32)
            for part in parts:
                total += to_float32(part)
            return (round_to(total, x.dtype),)

    class M3AllGather(_Collective):
        """x [n, m] -> [n, m * ranks], rank-major along the last axis."""

        def _run(self, x: Array, group_size: int) -> tuple[Array]:
            return (np.concatenate(self.exchange(x, group_size), axis=-1),)

    return [M3AllReduce, M3AllGather]
