"""The group of ranks on a CPU: what they tell each other, and how they end. Threads stand for the
processes but in one test, and a fake for NCCL and for each rank's engine."""

from __future__ import annotations

import logging
import os
import threading
import time
import types
from multiprocessing.connection import Pipe
from pathlib import Path
from queue import SimpleQueue

import ml_dtypes
import numpy as np
import pytest
from m3trt.runtime.step import StepInputs
from m3trt.runtime.tensorrt import rank_process, tensor_parallel
from m3trt.runtime.tensorrt.rank_process import RankOrders, main, receive
from m3trt.runtime.tensorrt.step_context import DeviceError
from m3trt.runtime.tensorrt.tensor_parallel import RankProcess, TensorParallelExecutor, start_rank

pytestmark = pytest.mark.smoke

SIZE = 4


def step_of(token, dtype=np.float32):
    return StepInputs(
        input_ids=np.array([token], np.int32),
        position_ids=np.zeros(1, np.int32),
        cu_query_lens=np.array([0, 1], np.int32),
        sequence_length=np.ones(1, np.int32),
        kv_cache_block_offsets=np.zeros((1, 1), np.int32),
        decode_shape=(1, 1),
        logit_rows=np.zeros(1, np.int32),
        prompt_embedding_table=np.full((1, 3), 1.5, dtype),
    )


class World:
    """All that the ranks did: `steps` by rank, `aborted`, and what they shall do."""

    def __init__(self):
        self.steps = {rank: [] for rank in range(SIZE)}
        self.closed, self.members, self.ended = [], [], []
        self.pages = {0: 70, 1: 50, 2: 60, 3: 80}
        self.aborted = threading.Event()
        self.cannot_load, self.cannot_join, self.fails_at = None, None, None
        self.gathering, self.barrier = threading.Barrier(SIZE), threading.Barrier(SIZE)


@pytest.fixture
def world(monkeypatch):
    world = World()

    class Executor:
        def __init__(self, engine, library, num_pages, plugin_library, rank, agree):
            if rank == world.cannot_load:
                raise DeviceError("no memory")
            self.rank, self.num_pages = rank, agree(min(num_pages, world.pages[rank]))

        def step(self, inputs):
            if world.fails_at == (self.rank, int(inputs.input_ids[0])):
                raise ValueError("a broken step")
            try:
                world.barrier.wait(5)
            except threading.BrokenBarrierError:
                return np.full((1, 1), np.nan, np.float32)  # what an aborted collective gives
            world.steps[self.rank].append(inputs)
            return np.full((1, 1), self.rank, np.float32)

        def close(self):
            world.closed.append(self.rank)

    class Member:
        def __init__(self, size, rank, group, plugin_library):
            assert (size, group) == (SIZE, b"group")
            if rank == world.cannot_join:
                raise DeviceError("no socket")
            world.members.append(rank)
            world.gathering.wait(30)  # as ncclCommInitRank: no rank goes on before all have come

        def abort(self):
            world.aborted.set()
            world.barrier.abort()

        def close(self): ...

    cuda = types.SimpleNamespace(device_count=lambda: SIZE, set_device=lambda rank: None)
    torch = types.SimpleNamespace(cuda=cuda)
    for module in (rank_process, tensor_parallel):
        monkeypatch.setattr(module, "import_torch", lambda: torch)
        monkeypatch.setattr(module, "TensorRTExecutor", Executor)
        monkeypatch.setattr(module, "Communicator", Member)
    monkeypatch.setattr(tensor_parallel, "unique_id", lambda: b"group")
    monkeypatch.setattr(rank_process.EngineDir, "load", lambda path: engine())
    monkeypatch.setattr(rank_process, "GRACE_S", 3600.0)
    return world


def engine(size=SIZE):
    return types.SimpleNamespace(path=Path("engine"), config=types.SimpleNamespace(tp_size=size))


@pytest.fixture
def start(world):
    """Starts `main` of a rank in a thread."""

    def start(orders):
        ours, theirs = Pipe()
        descriptor = os.dup(theirs.fileno())
        theirs.close()
        thread = threading.Thread(target=lambda: world.ended.append(main(descriptor)), daemon=True)
        ours.send(orders)
        thread.start()

        def end(timeout_s):
            thread.join(timeout_s)

        return RankProcess(orders.rank, ours, end)

    return start


def make(start):
    return TensorParallelExecutor(engine(), "tensorrt", 1000, Path("plugins.so"), start)


def test_all_ranks_run_every_step(world, start):
    group = make(start)
    assert group.num_pages == 50, "the fullest GPU decides"
    assert sorted(world.members) == [0, 1, 2, 3]
    for token in range(20):
        assert group.step(step_of(token, ml_dtypes.bfloat16)) == 0, "rank 0's logits"
    group.close()
    group.close()
    assert sorted(world.closed) == [0, 1, 2, 3]
    assert world.ended == [0, 0, 0]
    for steps in world.steps.values():
        assert [int(step.input_ids[0]) for step in steps] == list(range(20))
        assert all(step.decode_shape == (1, 1) for step in steps)
        assert all(step.prompt_embedding_table.dtype == ml_dtypes.bfloat16 for step in steps)
        assert all((step.prompt_embedding_table == 1.5).all() for step in steps)


def test_a_rank_that_cannot_be_loaded(world, start):
    world.cannot_load = 2
    with pytest.raises(DeviceError, match=r"rank 2 cannot be loaded: DeviceError: no memory"):
        make(start)
    assert world.members == [], "no rank waits for a group that will not come"


@pytest.mark.parametrize(
    ("rank", "reason"), [(3, "rank 3 failed: DeviceError: no socket"), (0, "^no socket")]
)
def test_a_rank_that_never_joins_the_group(world, start, rank, reason):
    """NCCL lets the others wait for it for ever."""
    world.cannot_join = rank
    before = time.monotonic()
    with pytest.raises(DeviceError, match=reason):
        make(start)
    assert time.monotonic() - before < 10
    assert not world.gathering.broken, "the others still wait"
    world.gathering.abort()


def test_a_rank_that_fails_in_a_step(world, start, caplog):
    world.fails_at = 3, 7
    group = make(start)
    group.step(step_of(0))
    with pytest.raises(DeviceError, match="rank 3 failed: ValueError: a broken step"):
        group.step(step_of(7))
    assert world.aborted.is_set(), "rank 0 waited in the step for rank 3"
    with pytest.raises(DeviceError, match="the tensor-parallel group has ended: rank 3 failed"):
        group.step(step_of(8))
    group.close()


def test_rank_0_that_fails_in_a_step(world, start):
    world.fails_at = 0, 7
    group = make(start)
    with pytest.raises(ValueError, match="a broken step"):
        group.step(step_of(7))
    assert world.aborted.is_set()
    with pytest.raises(DeviceError, match="rank 0 failed: a broken step"):
        group.step(step_of(8))
    group.close()


def test_too_few_gpus(world, start):
    with pytest.raises(DeviceError, match="tp_size 8 and this machine 4 GPUs") as caught:
        TensorParallelExecutor(engine(8), "tensorrt", 1000, Path("plugins.so"), start)
    assert "--executor reference" in str(caught.value), "the flag of m3trt.serve"


def test_a_rank_in_a_process_of_its_own(tmp_path):
    """Here it fails, at the latest for lack of a GPU, and says so through its socket."""
    orders = RankOrders(tmp_path, "tensorrt", Path("p.so"), 10, 1, b"group", logging.ERROR)
    rank = start_rank(orders)
    assert "config.json does not exist" in rank.connection.recv()
    with pytest.raises(EOFError):
        rank.connection.recv()
    rank.end(20.0)


def test_a_rank_whose_leader_has_gone_is_cut_off(monkeypatch):
    ends = []
    monkeypatch.setattr(rank_process, "GRACE_S", 0.01)
    monkeypatch.setattr(rank_process.os, "_exit", ends.append)
    leader, follower = Pipe()
    leader.send(step_of(1))
    leader.close()
    steps = SimpleQueue()
    before = time.monotonic()
    receive(follower, steps)
    assert steps.get().input_ids == 1
    assert steps.get() is None
    assert ends == [1]
    assert time.monotonic() - before >= 0.01
