"""M3CacheUpdate: builds everywhere with its caches aliased; on a GPU its results against fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import paged_reference as reference
import plugin_harness as harness
import pytest
import torch
from paged_steps import (
    BLOCK,
    DTYPES,
    HEAD,
    PACKED_PORTS,
    Request,
    Step,
    kv_pool,
    make_step,
    normal,
    random_pages,
    real,
)
from plugin_harness import Node, Port
from torch import Tensor

EPSILON, THETA, ROTARY = 1e-6, 5e6, 64


@dataclass(frozen=True)
class Shape:
    dtype: str
    kv: str
    heads: int
    kv_heads: int
    index: str = ""  # dtype of the index cache; none on a dense layer
    index_heads: int = 0
    rotary: int = ROTARY

    @property
    def row_count(self) -> int:
        return self.heads + 2 * self.kv_heads + (self.index_heads + 1 if self.index else 0)


SHAPES = {
    "dense-bf16": Shape("bf16", "bf16", 8, 4),
    "dense-f32": Shape("f32", "f32", 8, 1),
    "dense-e4m3": Shape("bf16", "e4m3", 16, 1),
    "sparse-bf16": Shape("bf16", "bf16", 64, 4, "bf16", 4),
    "sparse-f32": Shape("f32", "f32", 8, 4, "f32", 4),
    "sparse-e4m3-kv": Shape("bf16", "e4m3", 8, 1, "bf16", 1),
    "sparse-e4m3-index": Shape("bf16", "bf16", 8, 1, "e4m3", 1),
    "sparse-e4m3-both": Shape("f32", "e4m3", 8, 2, "e4m3", 2),
}
STEPS: dict[str, Callable[[], Step]] = {
    "context": lambda: make_step(
        [Request(n, n) for n in (1, 127, 128, 129)] + [Request(130, 2049)], padded_tokens=5
    ),
    "decode": lambda: make_step([], [1, 127, 128, 129, 2047, 2048, 2049], padded_rows=3),
    "mixed": lambda: make_step(
        [Request(3, 3), Request(0, 0), Request(300, 700)], [130, 4, 2049], q_len=4, padded_rows=2
    ),
    "empty": lambda: make_step([]),
}


def node(shape: Shape) -> Node:
    kv = Port("kv_cache", shape.kv, ("pages", 2, 128, shape.kv_heads, 128))
    inputs = [
        Port("qkv", shape.dtype, ("tokens", shape.row_count * HEAD)),
        Port("position_ids", "int32", ("tokens",)),
        *PACKED_PORTS,
        kv,
        Port("inv_freq", "f32", (shape.rotary // 2,)),
        Port("q_norm", "f32", (HEAD,)),
        Port("k_norm", "f32", (HEAD,)),
    ]
    outputs = [
        Port("q", shape.dtype, ("tokens", shape.heads, HEAD)),
        Port("kv_cache_out", shape.kv, kv.shape),
    ]
    aliases = [("kv_cache_out", "kv_cache")]
    if shape.index:
        index = Port("index_cache", shape.index, ("pages", 128, 128))
        inputs += [
            index,
            Port("index_q_norm", "f32", (HEAD,)),
            Port("index_k_norm", "f32", (HEAD,)),
        ]
        outputs += [
            Port("index_q", shape.dtype, ("tokens", shape.index_heads, HEAD)),
            Port("index_cache_out", shape.index, index.shape),
        ]
        aliases.append(("index_cache_out", "index_cache"))
    for name, dtype in (("kv_scale", shape.kv), ("index_scale", shape.index)):
        if dtype == "e4m3":
            inputs.append(Port(name, "f32", (1,)))
    attributes = (
        ("num_heads", shape.heads),
        ("num_kv_heads", shape.kv_heads),
        ("num_index_heads", shape.index_heads),
        ("head_size", HEAD),
        ("index_head_size", HEAD),
        ("rotary_dim", shape.rotary),
        ("epsilon", EPSILON),
    )
    return Node("M3CacheUpdate", tuple(inputs), tuple(outputs), attributes, tuple(aliases))


@pytest.mark.smoke
@pytest.mark.parametrize("shape", SHAPES)
def test_builds(shape: str) -> None:
    assert harness.build(node(SHAPES[shape])).nbytes > 0


DENSE, SPARSE = node(SHAPES["dense-bf16"]), node(SHAPES["sparse-bf16"])


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        pytest.param(DENSE.but(head_size=64), "'head_size' is 64", id="head-size"),
        pytest.param(SPARSE.but(index_head_size=16), "'index_head_size' is 16", id="index-size"),
        pytest.param(DENSE.but(rotary_dim=20), "'rotary_dim' is 20", id="rotary-dim"),
        pytest.param(DENSE.but(num_heads=6), "'num_heads' is 6", id="heads"),
        pytest.param(DENSE.but(epsilon=None), "'epsilon' is missing", id="missing"),
        pytest.param(DENSE.but(num_heads=16), "qkv has shape", id="qkv-width"),
        pytest.param(DENSE.but(rotary_dim=32), "inv_freq has shape", id="inv-freq"),
        pytest.param(DENSE.but(num_index_heads=4), "9 inputs are connected", id="inputs"),
        pytest.param(DENSE.retyped(q_norm="bf16"), "q_norm=bf16", id="norm-type"),
        pytest.param(
            SPARSE.reshaped(index_cache=("pages", 64, 128)), "index_cache has shape", id="index"
        ),
    ],
)
def test_refuses(bad: Node, sentence: str) -> None:
    with pytest.raises(harness.BuildError) as caught:
        harness.build(bad)
    assert sentence in str(caught.value)


def make_inputs(step: Step, shape: Shape, v_scale: float = 1.0) -> dict[str, Tensor]:
    qkv = normal(1, step.num_tokens, shape.row_count, HEAD) * 3
    qkv[:, shape.heads + shape.kv_heads : shape.heads + 2 * shape.kv_heads] *= v_scale
    qkv[step.num_real :] = torch.nan
    inputs = dict(step.inputs)
    inputs["qkv"] = qkv.flatten(1).to(DTYPES[shape.dtype])
    inputs["kv_cache"] = kv_pool(step, shape.kv_heads, shape.kv, seed=20)
    exponents = torch.arange(0, shape.rotary, 2, dtype=torch.float32) / shape.rotary
    inputs["inv_freq"] = 1.0 / THETA**exponents
    for i, name in enumerate(("q_norm", "k_norm", "index_q_norm", "index_k_norm")):
        inputs[name] = 1 + normal(30 + i, HEAD) * 0.3
    if shape.index:
        inputs["index_cache"] = random_pages(step, shape.index, 40, HEAD)
    inputs["kv_scale"], inputs["index_scale"] = torch.tensor([0.05]), torch.tensor([0.02])
    return inputs


def check_rounded(out: Tensor, exact: Tensor, scale: Tensor | None = None) -> None:
    """`out` is `exact` rounded once to its dtype, give or take fp32 arithmetic."""
    info = torch.finfo(out.dtype)
    unit = 1.0 if scale is None else scale.item()
    want = (exact / unit).clamp(-info.max, info.max)
    error = (real(out) - want).abs()
    # Half a unit in the last place, the subnormals' step, and what fp32 loses on the way.
    allowed = want.abs() * (info.eps / 2 + 2e-6) + info.smallest_normal * info.eps / 2 + 4e-6 / unit
    worst = (error - allowed).argmax() if error.numel() else 0
    assert (error <= allowed).all(), (
        f"error {error.flatten()[worst]:.3g} at {worst}, allowed {allowed.flatten()[worst]:.3g}"
    )


def check_cache(
    step: Step, before: Tensor, after: Tensor, exact: Tensor, scale: Tensor | None
) -> None:
    """Pages [P, 128, ...]: exact[i] at token i's slot, every other slot bit for bit as before."""
    expected = before.clone()
    for i, (request, position) in enumerate(step.tokens):
        page, slot = step.pages[request][position // BLOCK], position % BLOCK
        check_rounded(after[page, slot], exact[i], scale)
        expected[page, slot] = after[page, slot]
    assert harness.same_bits(after, expected), "a slot of no token of this step has changed"


def check(step: Step, shape: Shape, inputs: dict[str, Tensor], out: dict[str, Tensor]) -> None:
    n = step.num_real
    heads = real(inputs["qkv"])[:n].reshape(n, shape.row_count, HEAD)
    sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
    sizes += [shape.index_heads, 1] if shape.index else []
    parts = heads.split(sizes, dim=1)
    positions, inv_freq = inputs["position_ids"][:n], inputs["inv_freq"]

    def turned(part: int, norm: str) -> Tensor:
        return reference.norm_and_rotate(parts[part], inputs[norm], EPSILON, positions, inv_freq)

    kv_scale = inputs["kv_scale"] if shape.kv == "e4m3" else None
    check_rounded(out["q"][:n], turned(0, "q_norm"))
    assert (out["q"][n:] == 0).all(), "q of padding is not zero"
    before, after = inputs["kv_cache"], out["kv_cache_out"]
    check_cache(step, before[:, 0], after[:, 0], turned(1, "k_norm"), kv_scale)
    check_cache(step, before[:, 1], after[:, 1], parts[2], kv_scale)
    if shape.index:
        index_scale = inputs["index_scale"] if shape.index == "e4m3" else None
        check_rounded(out["index_q"][:n], turned(3, "index_q_norm"))
        assert (out["index_q"][n:] == 0).all(), "index_q of padding is not zero"
        exact = turned(4, "index_k_norm")[:, 0]
        check_cache(step, inputs["index_cache"], out["index_cache_out"], exact, index_scale)


gpu = pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")


@pytest.mark.gpu
@pytest.mark.full
@gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", STEPS)
def test_norms_rotates_and_writes(step: str, shape: str) -> None:
    batch = STEPS[step]()
    inputs = make_inputs(batch, SHAPES[shape])
    check(batch, SHAPES[shape], inputs, harness.run(node(SHAPES[shape]), inputs))


@pytest.mark.gpu
@pytest.mark.full
@gpu
@pytest.mark.parametrize("shape", ["dense-bf16", "sparse-f32", "sparse-e4m3-both"])
def test_long_contexts(shape: str) -> None:
    batch = make_step([Request(2, 70_000)], [70_001, 130], padded_rows=1)
    inputs = make_inputs(batch, SHAPES[shape])
    check(batch, SHAPES[shape], inputs, harness.run(node(SHAPES[shape]), inputs))


@pytest.mark.gpu
@pytest.mark.full
@gpu
@pytest.mark.parametrize("shape", ["dense-bf16", "sparse-e4m3-kv", "sparse-e4m3-both"])
@pytest.mark.parametrize("tokens", [1029, 4205, 8205])
def test_long_steps(tokens: int, shape: str) -> None:
    """From 1,024 tokens on a block takes two tokens, from 4,096 on up to eight, from 8,192 on four
    where it is small, as blocks of few heads are; the last takes fewer."""
    rest = tokens - 705
    batch = make_step(
        [Request(rest, rest + 100), Request(0, 0), Request(300, 300), Request(400, 1000)],
        padded_tokens=5,
    )
    assert batch.num_tokens == tokens
    inputs = make_inputs(batch, SHAPES[shape])
    check(batch, SHAPES[shape], inputs, harness.run(node(SHAPES[shape]), inputs))


@pytest.mark.gpu
@pytest.mark.full
@gpu
@pytest.mark.parametrize("shape", ["sparse-bf16", "sparse-e4m3-both"])
@pytest.mark.parametrize("rotary", [16, 48, 80, 128])
def test_other_channels_turn(rotary: int, shape: str) -> None:
    batch, other = STEPS["mixed"](), replace(SHAPES[shape], rotary=rotary)
    inputs = make_inputs(batch, other)
    check(batch, other, inputs, harness.run(node(other), inputs))


@pytest.mark.gpu
@pytest.mark.full
@gpu
def test_angles_of_the_last_positions_are_exact() -> None:
    """Positions up to 1,048,575 rotate by up to a million radians."""
    shape = SHAPES["sparse-f32"]
    batch = make_step([Request(64, 64)])
    inputs = make_inputs(batch, shape)
    far = torch.linspace(0, 1_048_575, 64).to(torch.int32)
    inputs["position_ids"] = far  # the slots come from the lengths
    check(batch, shape, inputs, harness.run(node(shape), inputs))


@pytest.mark.gpu
@pytest.mark.full
@gpu
def test_e4m3_saturates() -> None:
    shape = SHAPES["sparse-e4m3-both"]
    batch = make_step([Request(20, 300)], [129])
    inputs = make_inputs(batch, shape, v_scale=100.0)
    assert (real(inputs["qkv"]).abs() > 448 * inputs["kv_scale"]).any()
    check(batch, shape, inputs, harness.run(node(shape), inputs))


@pytest.mark.gpu
@pytest.mark.full
@gpu
def test_a_missing_page_is_not_written() -> None:
    shape = SHAPES["sparse-bf16"]
    batch = make_step([Request(4, 4)], [200, 129])
    inputs = make_inputs(batch, shape)
    inputs["kv_cache_block_offsets"] = inputs["kv_cache_block_offsets"].clone()
    inputs["kv_cache_block_offsets"][1] = -1
    out = harness.run(node(shape), inputs)
    for name in ("kv_cache", "index_cache"):
        page = batch.pages[1][1]
        assert harness.same_bits(out[f"{name}_out"][page], inputs[name][page])
