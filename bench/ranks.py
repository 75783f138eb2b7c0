"""One process a rank of a tensor-parallel group, started from a function, and what they send."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any


def run_ranks(size: int, count: int, work: Callable[..., None], *arguments: Any) -> list[list[Any]]:
    """Run `work`(connection, rank, *arguments) in a process for each of `size` ranks; for each of
    the `count` things that they send what each sent. No rank may wait for its reader: others would
    wait for it in a step.

    Raises:
        RuntimeError: a rank failed.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = zip(*(context.Pipe() for _ in range(size)), strict=True)
    ranks = [
        context.Process(target=work, args=(end, rank, *arguments), daemon=True)
        for rank, end in enumerate(theirs)
    ]
    for process, end in zip(ranks, theirs, strict=True):
        process.start()
        end.close()
    try:
        answers = [[_receive(connection, ranks) for connection in ours] for _ in range(count)]
        for process in ranks:
            process.join(10.0)
        if any(process.exitcode for process in ranks):
            raise RuntimeError("a rank failed, see its messages above")
        return answers
    finally:
        for process in ranks:
            process.kill()


def _receive(connection: Connection, ranks: Sequence[BaseProcess]) -> Any:
    """What comes next; a rank whose partner failed may wait for it for ever."""
    try:
        while not connection.poll(0.5):
            if any(process.exitcode for process in ranks):
                raise EOFError
        return connection.recv()
    except EOFError:
        raise RuntimeError("a rank failed, see its messages above") from None
