"""M3AllReduce and M3AllGather: build everywhere; a step without a communicator fails; on two GPUs
their results against fp64.
"""

from __future__ import annotations

import plugin_harness as harness
import pytest
import torch
from closeness import DTYPES, normal
from collective_ranks import CASES, check_rank, gather, reduce
from m3trt.bench.ranks import run_ranks
from m3trt.runtime.tensorrt.nccl import unique_id

NODES = {f"{make.__name__}-{dtype}": make(dtype) for make in (reduce, gather) for dtype in DTYPES}


@pytest.mark.smoke
@pytest.mark.parametrize("name", NODES)
def test_builds(name: str) -> None:
    assert harness.build(NODES[name]).nbytes > 0


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        pytest.param(reduce("f16"), "x=f16", id="f16"),
        pytest.param(reduce("bf16").but(group_size=1), "'group_size' is 1", id="alone"),
        pytest.param(gather("bf16").but(group_size=None), "'group_size' is missing", id="missing"),
        pytest.param(gather("bf16").reshaped(x=("tokens", 4, 12)), "x has 3 dimensions", id="rank"),
    ],
)
def test_refuses(bad: harness.Node, sentence: str) -> None:
    with pytest.raises(harness.BuildError) as caught:
        harness.build(bad)
    assert sentence in str(caught.value)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")
@pytest.mark.parametrize("name", NODES)
def test_step_without_communicator_fails(name: str) -> None:
    node = NODES[name]
    columns = node.inputs[0].shape[1]
    assert isinstance(columns, int)
    x = normal(1, 3, columns).to(DTYPES[node.inputs[0].dtype])
    with pytest.raises(AssertionError, match="failed"):
        harness.run(node, {"x": x})
    assert harness.run(node, {"x": x[:0]})["y"].shape == torch.Size([0, 96])


@pytest.fixture(scope="module")
def answers() -> dict[str, list[tuple[str, str]]]:
    """What both ranks sent for each case."""
    sent = run_ranks(2, len(CASES), check_rank, unique_id())
    return dict(zip(CASES, sent, strict=True))


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("case", CASES)
def test_values(answers: dict[str, list[tuple[str, str]]], case: str) -> None:
    """Three eager runs and a captured one give the same bits, on both ranks."""
    (first, bits), (second, other_bits) = answers[case]
    assert not first
    assert not second
    assert bits == other_bits
