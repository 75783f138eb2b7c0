from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from m3trt.runtime.reference.collectives import Communicator, collective_ops
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(30)]

BF16 = np.dtype(ml_dtypes.bfloat16)


def rank_node(communicator, rank, op, group_size):
    node = helper.make_node(op, ["x"], ["y"], domain="m3", name="node", group_size=group_size)
    values = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, None)] for n in "xy"]
    model = helper.make_model(
        helper.make_graph([node], "one", *values), opset_imports=[helper.make_opsetid("m3", 1)]
    )
    return ReferenceEvaluator(model, new_ops=collective_ops(communicator, rank))


def run_ranks(op, arrays):
    communicator = Communicator(len(arrays))
    nodes = [rank_node(communicator, rank, op, len(arrays)) for rank in range(len(arrays))]
    with ThreadPoolExecutor(len(arrays)) as pool:
        jobs = [
            pool.submit(node.run, None, {"x": x}) for node, x in zip(nodes, arrays, strict=True)
        ]
        return [job.result()[0] for job in jobs]


def test_all_reduce_sums_in_fp32_and_rounds_once(rng):
    arrays = [rng.standard_normal((5, 3)).astype(BF16) for _ in range(4)]
    want = sum(x.astype(np.float32) for x in arrays).astype(BF16)
    for y in run_ranks("M3AllReduce", arrays):
        assert y.dtype == BF16
        assert np.array_equal(y, want)


def test_all_gather_is_rank_major_on_the_last_axis(rng):
    arrays = [rng.standard_normal((5, 3)).astype(np.float32) for _ in range(4)]
    for y in run_ranks("M3AllGather", arrays):
        assert np.array_equal(y, np.concatenate(arrays, axis=1))


def test_abort_wakes_the_ranks_that_wait():
    communicator = Communicator(2)
    node = rank_node(communicator, 0, "M3AllReduce", 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(node.run, None, {"x": np.ones(1, np.float32)})
        communicator.abort()
        with pytest.raises(threading.BrokenBarrierError):
            waiting.result()


def test_a_group_of_another_size_is_refused():
    node = rank_node(Communicator(1), 0, "M3AllReduce", 8)
    with pytest.raises(ValueError, match="group_size 8, this group has 1"):
        node.run(None, {"x": np.ones(1, np.float32)})
