"""M3BlockSelect: builds everywhere; on a GPU its selections against fp64 scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import paged_reference as reference
import plugin_harness as harness
import pytest
import torch
from paged_steps import (
    BLOCK,
    DECODE_PORT,
    HEAD,
    PACKED_PORTS,
    Request,
    Step,
    make_step,
    random_pages,
    real,
    rows,
)
from plugin_harness import Node, Port
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    dtype: str
    cache: str
    heads: int
    top_k: int = 16
    init: int = 0
    local: int = 1


SHAPES = {
    "heads4-bf16": Shape("bf16", "bf16", 4),
    "heads1-bf16": Shape("bf16", "bf16", 1),
    "heads4-f32": Shape("f32", "f32", 4),
    "heads2-bf16-e4m3": Shape("bf16", "e4m3", 2),
    "heads1-f32-e4m3": Shape("f32", "e4m3", 1, top_k=4),
    "forced": Shape("bf16", "bf16", 4, top_k=8, init=2, local=3),
    "all-forced": Shape("f32", "f32", 3, top_k=3, init=1, local=2),
    "own-only": Shape("f32", "f32", 2, top_k=1),
    "top32": Shape("bf16", "bf16", 2, top_k=32),
}
STEPS: dict[str, Callable[[], Step]] = {
    "context": lambda: make_step(
        [Request(n, n) for n in (1, 127, 128, 129)]
        + [Request(40, n) for n in (2047, 2048, 2049)]
        + [Request(70, 5000)],
        padded_tokens=5,
    ),
    "decode": lambda: make_step(
        [], [1, 127, 128, 129, 2047, 2048, 2049, 2177, 9000], padded_rows=3
    ),
    "decode-4": lambda: make_step([], [4, 128, 2050, 5001, 4099], q_len=4, padded_rows=2),
    "decode-8": lambda: make_step([Request(33, 3000)], [8, 2051, 2500], q_len=8),
    "mixed": lambda: make_step(
        [Request(3, 3), Request(0, 0), Request(100, 2700)], [130, 2, 3049], q_len=2, padded_rows=2
    ),
    "all-padding": lambda: make_step([], [], padded_rows=4),
    "empty": lambda: make_step([]),
}


def node(shape: Shape) -> Node:
    inputs = [
        Port("index_q", shape.dtype, ("tokens", shape.heads, HEAD)),
        Port("index_cache", shape.cache, ("pages", 128, 128)),
        *PACKED_PORTS,
        DECODE_PORT,
    ]
    if shape.cache == "e4m3":
        inputs.append(Port("index_scale", "f32", (1,)))
    attributes = (
        ("block_size", BLOCK),
        ("top_k", shape.top_k),
        ("init_blocks", shape.init),
        ("local_blocks", shape.local),
    )
    out = Port("block_ids", "int32", (shape.heads, "tokens", shape.top_k))
    return Node("M3BlockSelect", tuple(inputs), (out,), attributes)


@pytest.mark.smoke
@pytest.mark.parametrize("shape", SHAPES)
def test_builds(shape: str) -> None:
    assert harness.build(node(SHAPES[shape])).nbytes > 0


BF16 = node(SHAPES["heads4-bf16"])


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        pytest.param(BF16.but(block_size=1), "'block_size' is 1", id="block-size"),
        pytest.param(BF16.but(top_k=33), "'top_k' is 33", id="top-k"),
        pytest.param(BF16.but(top_k=0), "'top_k' is 0", id="top-k-0"),
        pytest.param(BF16.but(local_blocks=0), "'local_blocks' is 0", id="local-0"),
        pytest.param(BF16.but(init_blocks=16), "must not exceed top_k", id="forced"),
        pytest.param(BF16.but(init_blocks=None), "'init_blocks' is missing", id="missing"),
        pytest.param(BF16.retyped(index_cache="f32"), "index_cache=f32", id="cache-type"),
        pytest.param(BF16.retyped(index_cache="e4m3"), "index_cache=e4m3", id="scale-missing"),
        pytest.param(BF16.reshaped(index_q=("tokens", 16, 128)), "index_q has shape", id="heads"),
        pytest.param(
            BF16.reshaped(index_cache=("pages", 128, 64)), "index_cache has shape", id="head-size"
        ),
        pytest.param(
            BF16.reshaped(kv_cache_block_offsets=("requests", 4, 4)),
            "kv_cache_block_offsets has shape",
            id="table",
        ),
    ],
)
def test_refuses(bad: Node, sentence: str) -> None:
    with pytest.raises(harness.BuildError) as caught:
        harness.build(bad)
    assert sentence in str(caught.value)


def make_inputs(step: Step, shape: Shape) -> dict[str, Tensor]:
    inputs = dict(step.inputs)
    inputs["index_q"] = rows(step, 1, shape.heads, HEAD, dtype=shape.dtype)
    inputs["index_cache"] = random_pages(step, shape.cache, 2, HEAD)
    inputs["index_scale"] = torch.tensor([0.5])
    return inputs


def check(
    step: Step,
    shape: Shape,
    inputs: dict[str, Tensor],
    ids: Tensor,
    tokens: Iterable[int] | None = None,
) -> None:
    """Every row (or those of `tokens`) is a right selection, and padding is -1."""
    assert (ids[:, step.num_real :] == -1).all(), "padding rows are not -1"
    scale = inputs["index_scale"] if shape.cache == "e4m3" else None
    q, pages = real(inputs["index_q"]), real(inputs["index_cache"], scale)
    undecided = total = 0
    for token in range(step.num_real) if tokens is None else tokens:
        scores = reference.block_scores(step, q, pages, token)
        # fp32 sums of 128 products of this size differ by no more than this.
        epsilon = 1e-5 * scores[scores.isfinite()].abs().max().item()
        for head in range(shape.heads):
            undecided += reference.check_selection(
                ids[head, token].tolist(),
                scores[head].tolist(),
                shape.top_k,
                shape.init,
                shape.local,
                epsilon,
            )
            total += 1
    assert undecided <= total // 50, f"{undecided} of {total} rows are decided by rounding"


gpu = pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")


@pytest.mark.gpu
@pytest.mark.full
@gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", STEPS)
def test_selects_the_best_blocks(step: str, shape: str) -> None:
    batch = STEPS[step]()
    inputs = make_inputs(batch, SHAPES[shape])
    ids = harness.run(node(SHAPES[shape]), inputs)["block_ids"]
    check(batch, SHAPES[shape], inputs, ids)


@pytest.mark.gpu
@pytest.mark.full
@gpu
def test_equal_scores_go_to_the_lower_block() -> None:
    """All keys equal in every block: blocks 0 .. 14 and the own one, in any arithmetic."""
    shape = SHAPES["heads4-bf16"]
    batch = make_step([Request(5, 4000)], [6000, 2049])
    inputs = make_inputs(batch, shape)
    inputs["index_cache"] = torch.where(
        inputs["index_cache"].isnan(), inputs["index_cache"], torch.ones((), dtype=torch.bfloat16)
    )
    inputs["index_q"][1] = -0.0  # products of both zeros tie as well
    ids = harness.run(node(shape), inputs)["block_ids"]
    for token, (_, position) in enumerate(batch.tokens):
        expected = [*range(15), position // BLOCK]
        assert ids[:, token].tolist() == [expected] * shape.heads, f"token {token}"


@pytest.mark.gpu
@pytest.mark.full
@gpu
def test_nan_scores_lose() -> None:
    shape = SHAPES["heads4-bf16"]
    batch = make_step([Request(3, 3000)], [5000])
    inputs = make_inputs(batch, shape)
    cache = inputs["index_cache"]
    for request in range(2):
        own = batch.pages[request]
        cache[own[4]] = torch.nan  # a whole block
        cache[own[9], ::2] = torch.nan  # its other keys still count
        cache[own[11], :, 5] = torch.inf  # +inf or -inf by the query's sign
    inputs["index_q"][1] = torch.nan  # nothing compares: the lowest blocks and the own one
    ids = harness.run(node(shape), inputs)["block_ids"]
    assert ids[:, 1].tolist() == [[*range(15), 23]] * shape.heads
    check(batch, shape, inputs, ids, tokens=[0, 2, 3])
    assert not (ids[:, [0, 2, 3]] == 4).any()


@pytest.mark.gpu
@pytest.mark.full
@gpu
def test_fewer_blocks_than_top_k_are_all_taken_whatever_they_score() -> None:
    shape = SHAPES["heads1-bf16"]
    batch = make_step([], [2048, 129, 1])
    inputs = make_inputs(batch, shape)
    inputs["index_q"][:] = torch.nan
    ids = harness.run(node(shape), inputs)["block_ids"][0].tolist()
    assert ids == [[*range(16)], [0, 1] + [-1] * 14, [0] + [-1] * 15]


@pytest.mark.gpu
@pytest.mark.full
@gpu
def test_context_and_decode_rows_agree() -> None:
    """The same positions select the same blocks as one chunk and as decode rows."""
    shape = SHAPES["heads4-bf16"]
    decode = make_step([], [5001, 2060, 129], q_len=4)
    context = make_step([Request(4, 5001), Request(4, 2060), Request(4, 129)])
    inputs = make_inputs(decode, shape)
    again = {**inputs, **context.inputs}  # the same seed gives the same pages
    first = harness.run(node(shape), inputs)["block_ids"]
    assert torch.equal(first, harness.run(node(shape), again)["block_ids"])


@pytest.mark.gpu
@pytest.mark.full
@gpu
def test_finds_needles_in_a_long_context() -> None:
    """At 70,000 tokens: block b holds a key that only head b % 4 looks for."""
    shape = SHAPES["heads4-bf16"]
    batch = make_step([Request(2, 70_000)], [69_999])
    inputs = make_inputs(batch, shape)
    needles = [0, 1, 77, 255, 256, 333, 450, 543]
    for request in range(2):
        for block in needles:
            page, head = batch.pages[request][block], block % 4
            direction = inputs["index_q"][0, head]
            inputs["index_q"][:, head] = direction
            inputs["index_cache"][page, (block * 31) % BLOCK] = direction * 4
    ids = harness.run(node(shape), inputs)["block_ids"]
    for block in needles:
        found = (ids[block % 4] == block).any(dim=-1)
        assert found.all(), f"block {block} is missing"
    check(batch, shape, inputs, ids)


@pytest.mark.gpu
@pytest.mark.full
@gpu
def test_works_in_rounds_when_the_scores_exceed_the_budget() -> None:
    """5,000 tokens with 4 heads on a table of 1,024 pages: 82 MB of f32 scores, 64 MB at once."""
    shape = SHAPES["heads4-f32"]
    batch = make_step([Request(5000, 5000)], spare_columns=984)
    inputs = make_inputs(batch, shape)
    ids = harness.run(node(shape), inputs)["block_ids"]
    edge = (64 << 20) // (4 * 1024 * 4)
    check(batch, shape, inputs, ids, tokens=[0, 2047, 2048, *range(edge - 3, edge + 3), 4999])
