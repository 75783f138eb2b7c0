"""M3SparseAttention: builds everywhere; on a GPU its results against fp64."""

from __future__ import annotations

import paged_reference as reference
import plugin_harness as harness
import pytest
import test_paged_attention as paged
import torch
from paged_steps import (
    BLOCK,
    DECODE_PORT,
    DTYPES,
    PACKED_PORTS,
    Request,
    Step,
    check_close,
    kv_pool,
    make_step,
    real,
    rows,
)
from plugin_harness import Node, Port

Inputs = dict[str, torch.Tensor]
SCALE = 128**-0.5
TOP_K = 16


def node(dtype: str, cache: str, heads: int, kv_heads: int, top_k: int = TOP_K) -> Node:
    inputs = [
        Port("q", dtype, ("tokens", heads, 128)),
        Port("kv_cache", cache, ("pages", 2, 128, kv_heads, 128)),
        Port("block_ids", "int32", (kv_heads, "tokens", top_k)),
        *PACKED_PORTS,
        DECODE_PORT,
    ]
    if cache == "e4m3":
        inputs.append(Port("kv_scale", "f32", (1,)))
    return Node(
        "M3SparseAttention",
        tuple(inputs),
        (Port("out", dtype, ("tokens", heads * 128)),),
        (("block_size", 128), ("softmax_scale", SCALE)),
    )


def choose(step: Step, kv_heads: int, top_k: int, seed: int = 9) -> torch.Tensor:
    """A random selection for every token and KV head on its own, the own block last, then -1.

    Padding rows hold block 0: they must not be followed.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(kv_heads, step.num_tokens, top_k, dtype=torch.int32)
    for head in range(kv_heads):
        for token, (_, position) in enumerate(step.tokens):
            own = position // BLOCK
            count = min(own, top_k - 1)
            chosen = torch.randperm(own, generator=generator)[:count].sort().values.tolist()
            row = [*chosen, own]
            ids[head, token] = torch.tensor(row + [-1] * (top_k - len(row)))
    return ids


@pytest.mark.smoke
@pytest.mark.parametrize("shape", paged.SHAPES)
def test_builds(shape: str) -> None:
    assert harness.build(node(*paged.SHAPES[shape])).nbytes > 0


BF16 = node("bf16", "bf16", 8, 4)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        pytest.param(BF16.but(block_size=16), "'block_size' is 16", id="block-size"),
        pytest.param(BF16.retyped(block_ids="f32"), "block_ids=f32", id="ids-type"),
        pytest.param(BF16.retyped(kv_cache="f32"), "kv_cache=f32", id="cache-type"),
        pytest.param(
            BF16.reshaped(block_ids=(2, "tokens", 16)), "block_ids has shape", id="ids-heads"
        ),
        pytest.param(
            BF16.reshaped(block_ids=("tokens", 4, 16)), "block_ids has shape", id="token-major"
        ),
        pytest.param(BF16.reshaped(q=("tokens", 8, 64)), "q has shape", id="head-size"),
    ],
)
def test_refuses(bad: Node, sentence: str) -> None:
    with pytest.raises(harness.BuildError) as caught:
        harness.build(bad)
    assert sentence in str(caught.value)


def inputs_of(
    step: Step, dtype: str, cache: str, heads: int, kv_heads: int
) -> dict[str, torch.Tensor]:
    inputs = dict(step.inputs)
    inputs["q"] = rows(step, 1, heads, 128, dtype=dtype, scale=2.0)
    inputs["kv_cache"] = kv_pool(step, kv_heads, cache, seed=2)
    inputs["kv_scale"] = torch.tensor([0.75])
    return inputs


def check(
    step: Step, inputs: dict[str, torch.Tensor], out: torch.Tensor, dtype: str, cache: str
) -> None:
    scale = inputs["kv_scale"] if cache == "e4m3" else None
    q, pages = real(inputs["q"]), real(inputs["kv_cache"], scale)
    exact, plain = (
        reference.attend_step(
            step, q.to(t), pages[:, 0].to(t), pages[:, 1].to(t), SCALE, inputs["block_ids"]
        )
        for t in (torch.float64, DTYPES[dtype])
    )
    assert (out[step.num_real :] == 0).all(), "padding rows are not zero"
    if step.num_real:
        check_close(out[: step.num_real], exact[: step.num_real], plain[: step.num_real])


gpu = pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")


@pytest.mark.gpu
@pytest.mark.full
@gpu
@pytest.mark.parametrize("top_k", [3, 16])
@pytest.mark.parametrize("shape", paged.SHAPES)
@pytest.mark.parametrize("step", paged.STEPS)
def test_attends_to_the_selection(step: str, shape: str, top_k: int) -> None:
    dtype, cache, heads, kv_heads = paged.SHAPES[shape]
    batch = paged.STEPS[step]()
    inputs = inputs_of(batch, *paged.SHAPES[shape])
    inputs["block_ids"] = choose(batch, kv_heads, top_k)
    out = harness.run(node(dtype, cache, heads, kv_heads, top_k), inputs)["out"]
    check(batch, inputs, out, dtype, cache)


@pytest.mark.gpu
@pytest.mark.full
@gpu
@pytest.mark.parametrize("shape", ["gqa16-bf16", "gqa16-f32", "gqa8-bf16-e4m3"])
def test_long_contexts(shape: str) -> None:
    dtype, cache, _, kv_heads = paged.SHAPES[shape]
    batch = make_step([Request(2, 70_000)], [70_001, 130], padded_rows=1)
    inputs = inputs_of(batch, *paged.SHAPES[shape])
    inputs["block_ids"] = choose(batch, kv_heads, TOP_K)
    out = harness.run(node(*paged.SHAPES[shape]), inputs)["out"]
    check(batch, inputs, out, dtype, cache)


@pytest.mark.gpu
@pytest.mark.full
@gpu
def test_skips_sentinels_anywhere_and_rows_without_blocks() -> None:
    batch = make_step([Request(30, 900)], [2049, 130])
    inputs = inputs_of(batch, "bf16", "bf16", 16, 2)
    ids = choose(batch, 2, TOP_K)
    ids[:, ::3, 0] = -1  # before valid entries
    ids[0, 5] = -1  # one KV head sees nothing, the other does
    ids[1, 7, -1] = 15  # a block behind the query, and none of its request's pages
    inputs["block_ids"] = ids
    out = harness.run(node("bf16", "bf16", 16, 2), inputs)["out"]
    assert (out[5, : 8 * 128] == 0).all()
    assert (out[5, 8 * 128 :] != 0).any()
    check(batch, inputs, out, "bf16", "bf16")


ROUTES = {
    "rows": [Request(20, 20_000)],
    "dense": [Request(150, 1500), Request(1, 1)],
    "blocks": [Request(90, 5000), Request(80, 2100)],
}


@pytest.mark.gpu
@pytest.mark.full
@gpu
@pytest.mark.parametrize("cache", ["bf16", "e4m3"])
@pytest.mark.parametrize("route", ROUTES)
def test_every_route_of_context_rows(route: str, cache: str) -> None:
    batch = make_step(ROUTES[route])
    inputs = inputs_of(batch, "bf16", cache, 32, 2)
    ids = choose(batch, 2, TOP_K)
    ids[:, ::3, 0] = -1
    ids[0, 5] = -1
    inputs["block_ids"] = ids
    out = harness.run(node("bf16", cache, 32, 2), inputs)["out"]
    check(batch, inputs, out, "bf16", cache)


@pytest.mark.gpu
@pytest.mark.full
@gpu
@pytest.mark.parametrize(
    "types", [("bf16", "bf16"), ("bf16", "e4m3"), ("f32", "f32")], ids=["bf16", "e4m3", "f32"]
)
@pytest.mark.parametrize("route", ROUTES)
def test_missing_pages_are_skipped(route: str, types: tuple[str, str]) -> None:
    """-1 inside a row of the page table, where blocks were chosen, also of decode rows."""
    batch = make_step(ROUTES[route], [2049, 200])
    inputs = inputs_of(batch, *types, 32, 2)
    chosen = choose(batch, 2, TOP_K)
    seen, table, pool = chosen.clone(), inputs["kv_cache_block_offsets"].clone(), inputs["kv_cache"]
    pool = pool.clone()
    for request, pages in enumerate(batch.pages):
        gone = torch.arange(request % 2, len(pages), 3)
        table[request, gone] = -1
        pool.view(torch.uint8)[torch.tensor(pages)[gone]] = 0xFF  # NaN
        tokens = torch.tensor([own == request for own, _ in batch.tokens])
        seen[:, tokens] = torch.where(torch.isin(seen[:, tokens], gone), -1, seen[:, tokens])
    given = inputs | {"block_ids": chosen, "kv_cache": pool, "kv_cache_block_offsets": table}
    out = harness.run(node(*types, 32, 2), given)["out"]
    check(batch, inputs | {"block_ids": seen}, out, *types)


@pytest.mark.gpu
@pytest.mark.full
@gpu
def test_all_blocks_selected_is_dense_attention_bit_for_bit() -> None:
    batch = make_step([Request(64, 600)], [2048, 1, 129], padded_rows=1)
    inputs = inputs_of(batch, "f32", "f32", 32, 2)
    inputs["block_ids"] = choose(batch, 2, TOP_K)
    sparse = harness.run(node("f32", "f32", 32, 2), inputs)["out"]
    dense = harness.run(paged.node("f32", "f32", 32, 2), inputs)["out"]
    assert harness.same_bits(sparse, dense)
