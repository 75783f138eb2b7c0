"""Runs builds in processes of their own: TensorRT ends the process when it fails badly, and its
peak memory is then one build's."""

from __future__ import annotations

import logging
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess

from m3trt.build.builder import BuildError, BuildReport, EngineTask, build_engine
from m3trt.convert.interrupt import uninterrupted

Running = dict[int, tuple[EngineTask, SpawnProcess, Connection]]


def build_all(
    tasks: Sequence[EngineTask],
    workers: int,
    on_done: Callable[[EngineTask, BuildReport], None],
    build: Callable[[EngineTask], BuildReport] = build_engine,
) -> None:
    """Run every task, at most `workers` at a time, and report each as it is done.

    Raises:
        BuildError: a build failed or its process died; the others are ended.
    """
    context = multiprocessing.get_context("spawn")
    waiting, running = list(tasks), Running()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                task = waiting.pop(0)
                with uninterrupted():  # a process that is not in `running` yet would go on alone
                    process, receiver = _start(context, build, task)
                    running[process.sentinel] = task, process, receiver
            for sentinel in wait(list(running)):
                assert isinstance(sentinel, int)
                task, process, receiver = running.pop(sentinel)
                on_done(task, _result(task, process, receiver))
    finally:
        with uninterrupted():
            for _, process, _ in running.values():
                process.terminate()
                process.join()


def _start(
    context: SpawnContext, build: Callable[[EngineTask], BuildReport], task: EngineTask
) -> tuple[SpawnProcess, Connection]:
    receiver, sender = context.Pipe(duplex=False)
    level = logging.getLogger().getEffectiveLevel()
    process = context.Process(target=_run, args=(build, task, level, sender), daemon=True)
    # The child inherits the mask: Ctrl-C reaches it too, but the parent handles it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        sender.close()
    return process, receiver


def _run(
    build: Callable[[EngineTask], BuildReport], task: EngineTask, level: int, sender: Connection
) -> None:
    logging.basicConfig(level=level, format=f"{task.name}: %(levelname)s %(message)s")
    try:
        sender.send(build(task))
    except Exception as error:
        logging.debug("build failed", exc_info=True)
        with suppress(BrokenPipeError):  # the parent was interrupted
            sender.send(f"{error}" if isinstance(error, RuntimeError) else f"{error!r}")


def _result(task: EngineTask, process: SpawnProcess, receiver: Connection) -> BuildReport:
    process.join()
    try:
        result = receiver.recv()
    except EOFError:
        raise BuildError(
            f"building {task.name} ended with exit code {process.exitcode} and no message: see"
            " TensorRT's output above; if memory ran out, use fewer --workers"
        ) from None
    if not isinstance(result, BuildReport):
        raise BuildError(str(result))
    return result
