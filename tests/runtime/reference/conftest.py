"""Single-node models, and a packed step with everything that may go wrong in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from m3trt.runtime.reference.collectives import Communicator, collective_ops
from m3trt.runtime.reference.program import OPS
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator


@pytest.fixture(scope="session")
def make_op() -> Callable[..., ReferenceEvaluator]:
    """make_op(op_type, inputs, outputs, **attributes) -> an evaluator of that one node."""

    def make(op_type: str, inputs: int, outputs: int = 1, **attributes: Any) -> ReferenceEvaluator:
        names = [f"x{i}" for i in range(inputs)], [f"y{i}" for i in range(outputs)]
        node = helper.make_node(op_type, *names, name="node", domain="m3", **attributes)
        values = [
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in group]
            for group in names
        ]
        graph = helper.make_graph([node], "one", *values)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("m3", 1)])
        return ReferenceEvaluator(model, new_ops=[*OPS, *collective_ops(Communicator(1), 0)])

    return make


@pytest.fixture(scope="session")
def run_op(make_op: Callable[..., ReferenceEvaluator]) -> Callable[..., list[Any]]:
    """run_op(op_type, *inputs, outputs=1, **attributes) -> the node's outputs."""

    def run(op_type: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> list[Any]:
        node = make_op(op_type, len(inputs), outputs, **attributes)
        result: list[Any] = node.run(None, {f"x{i}": x for i, x in enumerate(inputs)})
        return result

    return run


@dataclass
class Step:
    """Ragged requests, shuffled pages, one padded decode row, three padding tokens."""

    block: int
    cu_query_lens: Any
    sequence_length: Any
    page_table: Any
    tokens: int
    pages: int

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """(token, request, position) of every real token."""
        cu = self.cu_query_lens
        for r, length in enumerate(self.sequence_length):
            new = cu[r + 1] - cu[r]
            for i in range(new):
                yield int(cu[r] + i), r, int(length - new + i)

    @property
    def positions(self) -> Any:
        positions = np.zeros(self.tokens, np.int32)
        for token, _, position in self.rows():
            positions[token] = position
        return positions

    @property
    def batch(self) -> tuple[Any, Any, Any]:
        return self.cu_query_lens, self.sequence_length, self.page_table

    @property
    def decode_rows(self) -> Any:
        return np.zeros((3, 1), np.int32)

    def slot(self, request: int, position: int) -> tuple[int, int]:
        return int(self.page_table[request, position // self.block]), position % self.block

    def fill(self, cache: Any, lane_axes: int, rng: np.random.Generator) -> Any:
        """NaN everywhere, random values in the slots that sequences use."""
        cache[...] = np.nan
        for r, length in enumerate(self.sequence_length):
            for position in range(length):
                page, slot = self.slot(r, position)
                where = (page, slice(None), slot) if lane_axes == 2 else (page, slot)
                cache[where] = rng.standard_normal(cache[where].shape).astype(cache.dtype)
        return cache


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def step(rng: np.random.Generator) -> Step:
    block = 4
    #         whole prompt, chunk, block - 1, one token; then decode rows, the last one padded
    new = np.array([9, 6, 3, 1, 1, 1, 0])
    length = np.array([9, 17, 3, 1, 12, 13, 0], np.int32)
    pages, used = 40, rng.permutation(40)
    table = np.full((len(new), 6), -1, np.int32)
    for r, total in enumerate(length):
        count = -(-int(total) // block)
        table[r, :count], used = used[:count], used[count:]
    cu = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    return Step(block, cu, length, table, tokens=int(cu[-1]) + 3, pages=pages)
