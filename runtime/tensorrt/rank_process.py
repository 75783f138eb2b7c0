"""One rank of a tensor-parallel engine in a process of its own, on the GPU of its number.

`tensor_parallel.py` starts it as `python -m m3trt.runtime.tensorrt.rank_process FD` and speaks to
it through the socket FD. In order: orders to the rank, the pages that fit its GPU back, the pages
that all ranks take to it, then steps and at last None. Anything else that a rank sends is a
sentence that says what it failed with; it ends then. It also ends when the socket does.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from m3trt.build.engine_dir import EngineDir
from m3trt.runtime.step import StepInputs
from m3trt.runtime.tensorrt.executor import TensorRTExecutor
from m3trt.runtime.tensorrt.memory import import_torch
from m3trt.runtime.tensorrt.nccl import Communicator

GRACE_S = 10.0
"""How long a rank may take to end after its socket has, before it is cut off in mid-step."""


@dataclass(frozen=True, slots=True)
class RankOrders:
    """What a rank is told first."""

    engine: Path
    library: str
    plugin_library: Path
    num_pages: int
    rank: int
    group: bytes
    """NCCL's unique id."""
    log_level: int


def run_rank(connection: Connection, orders: RankOrders) -> None:
    """Load the rank, report to the leader, and run its steps until it says that it is over.

    Raises:
        EOFError: the leader has gone.
    """
    engine = EngineDir.load(orders.engine)
    import_torch().cuda.set_device(orders.rank)
    members: list[Communicator] = []

    def agree(pages: int) -> int:
        connection.send(pages)
        agreed: int | None = connection.recv()
        if agreed is None:
            raise EOFError
        size = engine.config.tp_size
        members.append(Communicator(size, orders.rank, orders.group, orders.plugin_library))
        return agreed

    executor = TensorRTExecutor(
        engine, orders.library, orders.num_pages, orders.plugin_library, orders.rank, agree
    )
    steps: SimpleQueue[StepInputs | None] = SimpleQueue()
    threading.Thread(target=receive, args=(connection, steps), daemon=True).start()
    while (inputs := steps.get()) is not None:
        executor.step(inputs)
    executor.close()
    for member in members:
        member.close()


def receive(connection: Connection, steps: SimpleQueue[StepInputs | None]) -> None:
    """Queue what the leader sends. Once that is over, a rank that is still in a kernel waits there
    for another that will not come: it is cut off."""
    inputs: StepInputs | None = None
    while True:
        try:
            inputs = connection.recv()
        except (EOFError, OSError):
            inputs = None
        steps.put(inputs)
        if inputs is None:
            break
    time.sleep(GRACE_S)
    os._exit(1)


def main(descriptor: int) -> int:
    """Returns 0 when the leader has ended the rank, 1 when one of them failed."""
    connection = Connection(descriptor)
    orders: RankOrders = connection.recv()
    logging.basicConfig(
        level=orders.log_level, format=f"rank {orders.rank}: %(levelname)s %(message)s"
    )
    try:
        run_rank(connection, orders)
    except (EOFError, BrokenPipeError):
        return 1
    except Exception as error:
        logging.exception("the rank failed")
        with suppress(OSError):
            connection.send(f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
