"""The collectives as nodes, and what each of two ranks does with them in a process of its own."""

from __future__ import annotations

import hashlib
from multiprocessing.connection import Connection

import plugin_harness as harness
import torch
from closeness import DTYPES, check_sums, normal
from m3trt.build.library import PLUGIN_LIBRARY
from m3trt.runtime.tensorrt.nccl import Communicator
from plugin_harness import Node, Port
from torch import Tensor


def reduce(dtype: str, columns: int = 96) -> Node:
    shape = ("tokens", columns)
    ports = (Port("x", dtype, shape),), (Port("y", dtype, shape),)
    return Node("M3AllReduce", *ports, (("group_size", 2),))


def gather(dtype: str, columns: int = 48) -> Node:
    ports = (Port("x", dtype, ("tokens", columns)),), (Port("y", dtype, ("tokens", 2 * columns)),)
    return Node("M3AllGather", *ports, (("group_size", 2),))


CASES = {
    f"{make.__name__}-{dtype}-{rows}": (make, dtype, rows)
    for make in (reduce, gather)
    for dtype in DTYPES
    for rows in (0, 1, 33, 4096)
}
COLUMNS = 2048


def check_rank(connection: Connection, rank: int, group: bytes) -> None:
    """For each case, send what is wrong, if anything, and a digest of the result."""
    torch.cuda.set_device(rank)
    member = Communicator(2, rank, group, PLUGIN_LIBRARY)
    for make, dtype, rows in CASES.values():
        given = [normal(seed, rows, COLUMNS, scale=3.0).to(DTYPES[dtype]) for seed in (1, 2)]
        try:
            y = harness.run(make(dtype, COLUMNS), {"x": given[rank]})["y"]
            (check_sum if make is reduce else check_columns)(y, given)
        except AssertionError as error:
            connection.send((str(error) or "wrong values", ""))
        else:
            connection.send(("", hashlib.sha256(y.view(torch.uint8).numpy()).hexdigest()))
    member.close()


def check_sum(y: Tensor, given: list[Tensor]) -> None:
    check_sums(y, given[0].double() + given[1].double(), given[0] + given[1], terms=2)


def check_columns(y: Tensor, given: list[Tensor]) -> None:
    """Those of the first rank, then those of the second."""
    assert harness.same_bits(y, torch.cat(given, dim=1))
