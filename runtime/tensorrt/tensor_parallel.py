"""Runs the engines of a tensor-parallel group: rank 0 here, each other rank in a process."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import numpy.typing as npt
from m3trt.build.engine_dir import EngineDir
from m3trt.build.library import PLUGIN_LIBRARY
from m3trt.runtime.step import StepInputs
from m3trt.runtime.tensorrt.executor import TensorRTExecutor
from m3trt.runtime.tensorrt.memory import import_torch
from m3trt.runtime.tensorrt.nccl import Communicator, unique_id
from m3trt.runtime.tensorrt.rank_process import GRACE_S, RankOrders
from m3trt.runtime.tensorrt.step_context import DeviceError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A started rank: its socket, and how to wait some seconds for its end and then force it."""

    rank: int
    connection: Connection
    end: Callable[[float], None]


def start_rank(orders: RankOrders) -> RankProcess:
    """Start a process for the rank and tell it its orders."""
    ours, theirs = Pipe()
    command = [sys.executable, "-m", "m3trt.runtime.tensorrt.rank_process", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    ours.send(orders)

    def end(timeout_s: float) -> None:
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    return RankProcess(orders.rank, ours, end)


class TensorParallelExecutor:
    """Runs an engine of several ranks on as many GPUs of this machine.

    Every rank gets the arrays of each step, and the collectives inside the step keep them together.
    When a rank fails the group ends: the step that runs raises, and so does every later one.

    Args:
        library, num_pages, plugin_library: as those of `TensorRTExecutor`; the caches of all ranks
            have as many pages as the fullest GPU holds.

    Raises:
        DeviceError: there are fewer GPUs than ranks, or a rank cannot be loaded.
        WeightFileError: the weights of rank 0 do not fit its engine.
    """

    def __init__(
        self,
        engine: EngineDir,
        library: str,
        num_pages: int,
        plugin_library: Path = PLUGIN_LIBRARY,
        start: Callable[[RankOrders], RankProcess] = start_rank,
    ) -> None:
        size = engine.config.tp_size
        gpus = import_torch().cuda.device_count()
        if gpus < size:
            raise DeviceError(
                f"the engine has tp_size {size} and this machine {gpus} GPUs: convert with a"
                " smaller --tp_size, or serve with --executor reference"
            )
        self._failure = ""
        self._joined_or_failed = threading.Event()
        self._closing = False
        self._communicator: Communicator | None = None
        self._ranks: list[RankProcess] = []
        self._watcher = threading.Thread(target=self._watch, name="m3-ranks", daemon=True)
        group, level = unique_id(), logging.getLogger().getEffectiveLevel()

        def agree(pages: int) -> int:
            agreed = min(pages, *(_pages_of(rank) for rank in self._ranks))
            self._tell(agreed)
            self._watcher.start()
            self._communicator = self._join(size, group, plugin_library)
            self._check()  # a rank that failed before there was something to abort
            return agreed

        try:
            for rank in range(1, size):
                orders = RankOrders(
                    engine.path.resolve(), library, plugin_library, num_pages, rank, group, level
                )
                self._ranks.append(start(orders))
            self._rank0 = TensorRTExecutor(engine, library, num_pages, plugin_library, 0, agree)
            self._check()
        except BaseException:
            self._closing = True
            self._end_ranks(0.0)
            raise
        self.num_pages = self._rank0.num_pages

    def step(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """Run one step on all ranks and return logits fp32 [n, vocab_size].

        Raises:
            DeviceError: a rank failed, now or in an earlier step.
        """
        self._check()
        try:
            self._tell(inputs)
            logits = self._rank0.step(inputs)
        except BaseException as error:
            self._fail(f"rank 0 failed: {error}")  # the others wait for it
            raise
        self._check()
        return logits

    def close(self) -> None:
        """Release the GPUs and end the processes."""
        if self._closing:
            return
        self._closing = True
        try:
            self._tell(None)
            self._rank0.close()  # with its captured steps, which must go before the group
            if self._communicator is not None:
                self._communicator.close()
        finally:
            self._end_ranks(GRACE_S + 5.0)

    def _join(self, size: int, group: bytes, plugin_library: Path) -> Communicator:
        """Wait until all ranks have come or one has failed.

        NCCL itself waits for ever for a rank that does not come, so it does in a thread, which is
        then left behind. (A communicator that joins without waiting would never wait: each
        collective of a step could return before it is launched.)
        """
        joined: Future[Communicator] = Future()
        joined.add_done_callback(lambda _: self._joined_or_failed.set())

        def join() -> None:
            try:
                import_torch().cuda.set_device(0)  # of this thread
                joined.set_result(Communicator(size, 0, group, plugin_library))
            except BaseException as error:
                joined.set_exception(error)

        threading.Thread(target=join, name="m3-join", daemon=True).start()
        self._joined_or_failed.wait()
        if self._failure:  # who still joins has nobody left
            joined.add_done_callback(_abort)
        self._check()
        return joined.result()

    def _tell(self, what: object) -> None:
        message = ForkingPickler.dumps(what)
        for rank in self._ranks:
            with suppress(BrokenPipeError, ConnectionResetError):  # the watcher says why
                rank.connection.send_bytes(message)

    def _check(self) -> None:
        if self._failure:
            raise DeviceError(f"the tensor-parallel group has ended: {self._failure}")

    def _watch(self) -> None:
        """Once it has told its pages, a rank says nothing unless it fails."""
        ended = wait([rank.connection for rank in self._ranks])[0]
        if not self._closing:
            rank = next(rank for rank in self._ranks if rank.connection is ended)
            self._fail(f"rank {rank.rank} failed: {_last_words(rank)}")

    def _fail(self, reason: str) -> None:
        """Free the ranks that wait for one that will not come."""
        if not self._failure:
            self._failure = reason
            logger.error("%s", reason)
            self._joined_or_failed.set()
            if self._communicator is not None:
                self._communicator.abort()

    def _end_ranks(self, timeout_s: float) -> None:
        for rank in self._ranks:
            rank.end(timeout_s)
            rank.connection.close()


def _pages_of(rank: RankProcess) -> int:
    """The pages that fit the rank's GPU.

    Raises:
        DeviceError: the rank failed.
    """
    try:
        answer = rank.connection.recv()
    except (EOFError, OSError):
        answer = "its process ended"
    if isinstance(answer, int):
        return answer
    raise DeviceError(f"rank {rank.rank} cannot be loaded: {answer}")


def _abort(joined: Future[Communicator]) -> None:
    if joined.exception() is None:
        joined.result().abort()


def _last_words(rank: RankProcess) -> str:
    try:
        return str(rank.connection.recv())
    except (EOFError, OSError):
        return "its process ended"
