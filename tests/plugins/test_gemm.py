"""M3Gemm: builds everywhere; on a GPU its results against fp64."""

from __future__ import annotations

import plugin_harness as harness
import pytest
import torch
from closeness import DTYPES, check_sums, normal
from plugin_harness import Node, Port
from torch import Tensor

VARIANTS = {
    "plain": ("none", False, "same"),
    "bias": ("none", True, "same"),
    "gelu": ("gelu_erf", True, "same"),
    "gelu-no-bias": ("gelu_erf", False, "same"),
    "logits": ("none", False, "float32"),
    "bias-widened": ("none", True, "float32"),
    "gelu-widened": ("gelu_erf", True, "float32"),
}
SIZES = {  # rows, N, K
    "empty": (0, 64, 64),
    "one-row": (1, 96, 256),
    "odd": (3, 37, 53),
    "tail": (129, 200, 176),
    "deep": (64, 128, 6144),
}


def node(dtype: str, variant: str, n: int, k: int) -> Node:
    epilogue, bias, output = VARIANTS[variant]
    inputs = [Port("x", dtype, ("tokens", k)), Port("weight", dtype, (n, k))]
    if bias:
        inputs.append(Port("bias", dtype, (n,)))
    out = "f32" if output == "float32" else dtype
    return Node(
        "M3Gemm",
        tuple(inputs),
        (Port("y", out, ("tokens", n)),),
        (("has_bias", int(bias)), ("epilogue", epilogue), ("output_dtype", output)),
    )


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_builds(variant: str, dtype: str) -> None:
    assert harness.build(node(dtype, variant, 96, 64)).nbytes > 0


PLAIN = node("bf16", "plain", 96, 64)
BIAS = node("bf16", "bias", 96, 64)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        pytest.param(PLAIN.but(epilogue="relu"), "allowed are none|gelu_erf", id="epilogue"),
        pytest.param(PLAIN.but(epilogue=None), "'epilogue' is missing", id="missing"),
        pytest.param(PLAIN.but(has_bias=1), "2 inputs are connected", id="bias-missing"),
        pytest.param(BIAS.but(has_bias=0), "3 inputs are connected", id="bias-left-over"),
        pytest.param(PLAIN.retyped(x="f16", weight="f16", y="f16"), "x=f16", id="f16"),
        pytest.param(PLAIN.retyped(weight="f32"), "x=bf16 weight=f32", id="mixed"),
        pytest.param(PLAIN.reshaped(weight=(96, 32)), "last dimensions must agree", id="depth"),
        pytest.param(PLAIN.reshaped(weight=(96, 64, 1)), "exactly 2", id="rank"),
        pytest.param(BIAS.reshaped(bias=(64,)), "bias has shape [64]", id="bias-shape"),
    ],
)
def test_refuses(bad: Node, sentence: str) -> None:
    with pytest.raises(harness.BuildError) as caught:
        harness.build(bad)
    assert sentence in str(caught.value)


def formula(x: Tensor, weight: Tensor, bias: Tensor | None, epilogue: str) -> Tensor:
    y = x @ weight.T
    if bias is not None:
        y = y + bias
    return torch.nn.functional.gelu(y) if epilogue == "gelu_erf" else y


def check(dtype: str, variant: str, rows: int, n: int, k: int) -> None:
    epilogue, bias, output = VARIANTS[variant]
    inputs = {
        "x": normal(1, rows, k).to(DTYPES[dtype]),
        "weight": normal(2, n, k, scale=k**-0.5).to(DTYPES[dtype]),
    }
    if bias:
        inputs["bias"] = normal(3, n).to(DTYPES[dtype])
    y = harness.run(node(dtype, variant, n, k), inputs)["y"]
    working = torch.float32 if output == "float32" else DTYPES[dtype]
    exact, baseline = (
        formula(
            inputs["x"].to(t),
            inputs["weight"].to(t),
            inputs["bias"].to(t) if bias else None,
            epilogue,
        )
        for t in (torch.float64, working)
    )
    assert y.dtype == working
    check_sums(y, exact, baseline, terms=k)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", SIZES)
def test_is_exact_product(size: str, variant: str, dtype: str) -> None:
    check(dtype, variant, *SIZES[size])


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")
@pytest.mark.parametrize("variant", ["plain", "logits"])
@pytest.mark.parametrize(
    ("n", "k"),
    [(1, 128), (333, 384), (2113, 1536), (6144, 1024), (300, 2048), (300, 3072), (2113, 6144)],
)
@pytest.mark.parametrize("rows", range(1, 10))
def test_few_rows(rows: int, n: int, k: int, variant: str) -> None:
    """Up to 8 rows have a kernel of their own: fewer rows of the weight than multiprocessors, a
    tile of sixteen or several, warps with many, one or no pieces of K, of each length."""
    check("bf16", variant, rows, n, k)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")
@pytest.mark.parametrize("rows", [1, 5, 6, 8])
def test_few_rows_of_many_channels(rows: int) -> None:
    """Rows that leave the weights most of the shared memory, just enough, and too little."""
    check("bf16", "plain", rows, 2200, 12288)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")
def test_long_input_goes_slab_by_slab() -> None:
    """7,000 x 5,120 fp32 sums exceed the workspace that waits for the epilogue."""
    check("bf16", "gelu", 7000, 5120, 64)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")
def test_the_largest_binding() -> None:
    """A weight of 2**31 - 64 elements, 4.3 GB: TensorRT miscomputes from 2**31 on."""
    n, k = (1 << 25) - 1, 64
    generator = torch.Generator("cuda").manual_seed(1)
    x, weight = (
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for shape in ((1, k), (n, k))
    )
    y = harness.run(node("bf16", "plain", n, k), {"x": x, "weight": weight})["y"]
    exact = (weight.float() @ x.float().T).flatten().cpu()
    assert torch.isfinite(y).all()
    assert (y.flatten().float() - exact).abs().max() <= exact.abs().max() * 2**-8
