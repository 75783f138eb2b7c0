"""M3VarlenAttention: builds everywhere; on a GPU its results against fp64."""

from __future__ import annotations

import plugin_harness as harness
import pytest
import torch
from closeness import DTYPES, check_sums, normal
from plugin_harness import Node, Port
from torch import Tensor

HEADS = {"small": (2, 20), "vision": (16, 80), "widest": (3, 128), "one": (1, 1)}
SEGMENTS: dict[str, tuple[list[int], int]] = {  # lengths, rows of padding
    "none": ([], 0),
    "only-padding": ([], 7),
    "one-row": ([1], 0),
    "one-image": ([324], 0),
    "borders": ([31, 32, 33, 1, 64], 0),
    "empty-segment": ([16, 0, 40], 5),
}


def node(dtype: str, heads: int, head_size: int) -> Node:
    inputs = [Port(name, dtype, ("tokens", heads, head_size)) for name in "qkv"]
    return Node(
        "M3VarlenAttention",
        (*inputs, Port("cu_seqlens", "int32", ("requests+1",))),
        (Port("y", dtype, ("tokens", heads * head_size)),),
        (("softmax_scale", head_size**-0.5),),
    )


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_builds(heads: str, dtype: str) -> None:
    assert harness.build(node(dtype, *HEADS[heads])).nbytes > 0


BF16 = node("bf16", 2, 20)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        pytest.param(BF16.but(softmax_scale=None), "'softmax_scale' is missing", id="missing"),
        pytest.param(BF16.retyped(v="f32"), "v=f32", id="mixed"),
        pytest.param(BF16.retyped(cu_seqlens="f32"), "cu_seqlens=f32", id="lengths-type"),
        pytest.param(BF16.reshaped(k=("tokens", 2, 24)), "must be equal", id="head-size"),
        pytest.param(node("bf16", 1, 129), "head sizes 1 to 128", id="too-wide"),
        pytest.param(BF16.reshaped(cu_seqlens=("requests+1", 1)), "takes 1 dimensions", id="rank"),
    ],
)
def test_refuses(bad: Node, sentence: str) -> None:
    with pytest.raises(harness.BuildError) as caught:
        harness.build(bad)
    assert sentence in str(caught.value)


def formula(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], padding: int) -> Tensor:
    pieces = []
    for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        scores = torch.einsum("qhd,khd->hqk", a, b) * a.shape[-1] ** -0.5
        pieces.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), c).flatten(1))
    pieces.append(q.new_zeros(padding, q.shape[1] * q.shape[2]))
    return torch.cat(pieces)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("segments", SEGMENTS)
def test_is_exact_attention(segments: str, heads: str, dtype: str) -> None:
    lengths, padding = SEGMENTS[segments]
    rows = sum(lengths)
    inputs = {}
    for seed, name in enumerate("qkv"):
        tensor = normal(seed, rows + padding, *HEADS[heads]).to(DTYPES[dtype])
        tensor[rows:] = float("nan")  # padding must not reach any row
        inputs[name] = tensor
    ends = torch.tensor([0, *lengths]).cumsum(0)
    y = harness.run(node(dtype, *HEADS[heads]), {**inputs, "cu_seqlens": ends.int()})["y"]
    exact, baseline = (
        formula(*(inputs[name][:rows].to(t) for name in "qkv"), lengths, padding)
        for t in (torch.float64, DTYPES[dtype])
    )
    assert (y[rows:] == 0).all()
    check_sums(y[:rows], exact[:rows], baseline[:rows], terms=max(lengths, default=1))
