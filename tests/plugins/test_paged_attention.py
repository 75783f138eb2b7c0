"""M3PagedAttention: builds everywhere; on a GPU its results against fp64."""

from __future__ import annotations

from collections.abc import Callable

import paged_reference as reference
import plugin_harness as harness
import pytest
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

SCALE = 128**-0.5

STEPS: dict[str, Callable[[], Step]] = {
    "context": lambda: make_step(
        [Request(n, n) for n in (1, 127, 128, 129)] + [Request(40, n) for n in (2047, 2048, 2049)],
        padded_tokens=5,
    ),
    "decode": lambda: make_step([], [1, 127, 128, 129, 2047, 2048, 2049], padded_rows=3),
    "decode-4": lambda: make_step([], [4, 127, 128, 129, 2047, 2048, 2049], q_len=4, padded_rows=2),
    "decode-8": lambda: make_step([], [8, 127, 128, 135, 2049], q_len=8, padded_rows=1),
    "many-chunks": lambda: make_step([Request(n % 7 + 1, 40 * n + 9) for n in range(40)]),
    "mixed": lambda: make_step(
        [Request(3, 3), Request(0, 0), Request(100, 700)], [130, 2, 2049], q_len=2, padded_rows=2
    ),
    "all-padding": lambda: make_step([], [], padded_rows=4),
    "empty": lambda: make_step([]),
}
SHAPES = {
    "gqa2-bf16": ("bf16", "bf16", 8, 4),
    "gqa8-bf16": ("bf16", "bf16", 8, 1),
    "gqa16-bf16": ("bf16", "bf16", 32, 2),
    "gqa6-bf16": ("bf16", "bf16", 12, 2),
    "gqa1-f32": ("f32", "f32", 2, 2),
    "gqa16-f32": ("f32", "f32", 16, 1),
    "gqa8-bf16-e4m3": ("bf16", "e4m3", 16, 2),
    "gqa4-f32-e4m3": ("f32", "e4m3", 8, 2),
}


def node(dtype: str, cache: str, heads: int, kv_heads: int) -> Node:
    inputs = [
        Port("q", dtype, ("tokens", heads, 128)),
        Port("kv_cache", cache, ("pages", 2, 128, kv_heads, 128)),
        *PACKED_PORTS,
        DECODE_PORT,
    ]
    if cache == "e4m3":
        inputs.append(Port("kv_scale", "f32", (1,)))
    return Node(
        "M3PagedAttention",
        tuple(inputs),
        (Port("out", dtype, ("tokens", heads * 128)),),
        (("block_size", 128), ("softmax_scale", SCALE)),
    )


@pytest.mark.smoke
@pytest.mark.parametrize("shape", SHAPES)
def test_builds(shape: str) -> None:
    assert harness.build(node(*SHAPES[shape])).nbytes > 0


BF16 = node("bf16", "bf16", 8, 4)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        pytest.param(BF16.but(block_size=64), "'block_size' is 64", id="block-size"),
        pytest.param(BF16.but(softmax_scale=None), "'softmax_scale' is missing", id="missing"),
        pytest.param(BF16.but(block_size=127.5), "'block_size' is a float", id="wrong-type"),
        pytest.param(BF16.retyped(q="f16", out="f16"), "q=f16", id="f16"),
        pytest.param(BF16.retyped(kv_cache="e4m3"), "kv_cache=e4m3", id="scale-missing"),
        pytest.param(BF16.retyped(decode_rows="f32"), "decode_rows=f32", id="decode-rows-type"),
        pytest.param(BF16.reshaped(q=("tokens", 6, 128)), "with 4 KV heads", id="gqa"),
        pytest.param(BF16.reshaped(q=("tokens", 128, 128)), "1 to 16 times", id="gqa32"),
        pytest.param(
            BF16.reshaped(kv_cache=("pages", 2, 64, 4, 128)), "kv_cache has shape", id="page-size"
        ),
        pytest.param(
            BF16.reshaped(cu_query_lens=("requests",)), "cu_query_lens has shape", id="offsets"
        ),
        pytest.param(
            BF16.reshaped(decode_rows=("decode_requests", 16)), "decode_rows has shape", id="q-len"
        ),
    ],
)
def test_refuses(bad: Node, sentence: str) -> None:
    with pytest.raises(harness.BuildError) as caught:
        harness.build(bad)
    assert sentence in str(caught.value)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", STEPS)
def test_is_exact_attention(step: str, shape: str) -> None:
    check_exact(STEPS[step](), shape)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")
@pytest.mark.parametrize("shape", ["gqa2-bf16", "gqa16-bf16"])
def test_long_contexts(shape: str) -> None:
    """Decode rows that many blocks share beside rows that one block finishes."""
    check_exact(make_step([Request(3, 9000)], [70_000, 1, 5000], padded_rows=1), shape)
    check_exact(make_step([], [70_001, 8], q_len=3), shape)


MISSING = {0: [0, 5, 6, 11], 1: [0], 2: [3, 16], 4: [*range(32)], 5: [0, 1]}
"""Blocks without a page: first, last and inner ones, 32 in a row, and all of a request."""


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")
@pytest.mark.parametrize("shape", SHAPES)
def test_missing_pages_are_skipped(shape: str) -> None:
    """-1 inside a row of the page table hides its keys; a token that sees none gives zeros."""
    kv_heads = SHAPES[shape][-1]
    batch = make_step([Request(300, 1500), Request(3, 40)], [2049, 100, 5000, 200], q_len=2)
    inputs = inputs_of(batch, shape)
    present = torch.full((kv_heads, batch.num_tokens, 40), -1, dtype=torch.int32)
    for token, (request, position) in enumerate(batch.tokens):
        gone = MISSING.get(request, [])
        blocks = [block for block in range(position // BLOCK + 1) if block not in gone]
        present[:, token, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    table, pool = inputs["kv_cache_block_offsets"].clone(), inputs["kv_cache"].clone()
    for request, blocks in MISSING.items():
        table[request, blocks] = -1
        pool.view(torch.uint8)[[batch.pages[request][block] for block in blocks]] = 0xFF  # NaN
    holed = {**inputs, "kv_cache_block_offsets": table, "kv_cache": pool}
    out = harness.run(node(*SHAPES[shape]), holed)["out"]
    check(batch, shape, inputs, out, present)
    blind = [token for token, (request, _) in enumerate(batch.tokens) if request in (1, 5)]
    assert (out[blind] == 0).all()


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")
@pytest.mark.parametrize("shape", ["gqa8-bf16", "gqa16-bf16"])
@pytest.mark.parametrize("keys", ["rising", "falling", "negative"])
def test_maximum_moves(keys: str, shape: str) -> None:
    """Pages whose scores exceed those of all earlier ones, by far and by little."""
    check_exact(make_step([Request(300, 1500), Request(20, 900)]), shape, keys)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")
@pytest.mark.parametrize("cut", [1, 24, 35])
def test_rows_do_not_depend_on_their_chunk(cut: int) -> None:
    """A chunk in two steps gives the bits of one step, although its rows share tiles."""
    whole = make_step([Request(40, 1500)])
    spec = node("bf16", "bf16", 16, 1)
    inputs = dict(whole.inputs)
    inputs["q"] = rows(whole, 1, 16, 128, dtype="bf16", scale=2.0)
    inputs["kv_cache"] = scaled_keys(whole, kv_pool(whole, 1, "bf16", seed=2), "rising")
    expected = harness.run(spec, inputs)["out"]
    for first, last in ((0, cut), (cut, 40)):
        part = dict(inputs)
        part["q"] = inputs["q"][first:last]
        part["cu_query_lens"] = torch.tensor([0, last - first], dtype=torch.int32)
        part["sequence_length"] = torch.tensor([1460 + last], dtype=torch.int32)
        assert harness.same_bits(harness.run(spec, part)["out"], expected[first:last])


def scaled_keys(batch: Step, pages: torch.Tensor, keys: str) -> torch.Tensor:
    """Keys a tenth as large to eight times as large, from page to page of each request.

    Rising in the order in which kernels read pages, from the last to the first; or none positive.
    """
    if keys == "negative":
        pages[:, 0] = -pages[:, 0].abs()
    for own in batch.pages:
        factors = torch.logspace(3, -3.3, len(own), base=2).tolist()
        for page, factor in zip(own, factors if keys == "rising" else factors[::-1], strict=True):
            pages[page, 0] *= factor
    return pages


def inputs_of(batch: Step, shape: str) -> dict[str, torch.Tensor]:
    dtype, cache, heads, kv_heads = SHAPES[shape]
    inputs = dict(batch.inputs)
    inputs["q"] = rows(batch, 1, heads, 128, dtype=dtype, scale=2.0)
    inputs["kv_cache"] = kv_pool(batch, kv_heads, cache, seed=2)
    inputs["kv_scale"] = torch.tensor([0.75])
    return inputs


def check_exact(batch: Step, shape: str, keys: str = "alike") -> None:
    inputs = inputs_of(batch, shape)
    if keys != "alike":
        inputs["kv_cache"] = scaled_keys(batch, inputs["kv_cache"], keys)
    if keys == "negative":
        inputs["q"] = inputs["q"].abs()
    check(batch, shape, inputs, harness.run(node(*SHAPES[shape]), inputs)["out"])


def check(
    batch: Step,
    shape: str,
    inputs: dict[str, torch.Tensor],
    out: torch.Tensor,
    block_ids: torch.Tensor | None = None,
) -> None:
    """`out` is exact attention to all blocks, or to those of `block_ids` [Hkv, tokens, ..]."""
    dtype, cache, _, _ = SHAPES[shape]
    scale = inputs["kv_scale"] if cache == "e4m3" else None
    q, pages = real(inputs["q"]), real(inputs["kv_cache"], scale)
    exact, plain = (
        reference.attend_step(
            batch, q.to(t), pages[:, 0].to(t), pages[:, 1].to(t), SCALE, block_ids
        )
        for t in (torch.float64, DTYPES[dtype])
    )
    assert (out[batch.num_real :] == 0).all(), "padding rows are not zero"
    if batch.num_real:
        check_close(out[: batch.num_real], exact[: batch.num_real], plain[: batch.num_real])


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_rows_do_not_depend_on_their_neighbours(dtype: str) -> None:
    """The last four tokens give the same bits in another pool, beside another request.

    In f32 also as decode rows; in bf16 those depend on how the batch is split over the GPU.
    """
    spec = node(dtype, dtype, 16, 1)
    lengths = [129, 2049, 400]
    chunks = [Request(4, n) for n in lengths]
    alone = make_step([], lengths, q_len=4) if dtype == "f32" else make_step(chunks)
    beside = make_step(chunks, [300], seed=0)
    pages = kv_pool(alone, 1, dtype, seed=2)
    inputs = dict(alone.inputs)
    inputs["q"] = rows(alone, 1, 16, 128, dtype=dtype)
    inputs["kv_cache"] = pages
    expected = harness.run(spec, inputs)["out"]

    other = kv_pool(beside, 1, dtype, seed=50)
    for request in range(len(lengths)):
        other[beside.pages[request]] = pages[alone.pages[request]]
    again = dict(beside.inputs)
    again["q"] = torch.cat([inputs["q"], rows(beside, 5, 16, 128, dtype=dtype)[-1:]])
    again["kv_cache"] = other
    assert harness.same_bits(harness.run(spec, again)["out"][:12], expected)
