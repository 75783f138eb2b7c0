from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

pytestmark = pytest.mark.smoke

BF16 = np.dtype(ml_dtypes.bfloat16)


def exact(x, weight, bias, epilogue):
    y = x.astype(np.float64) @ weight.astype(np.float64).T + bias.astype(np.float64)
    if epilogue == "gelu_erf":
        y = y * 0.5 * (1 + np.vectorize(math.erf)(y / math.sqrt(2)))
    return y


@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("epilogue", ["none", "gelu_erf"])
@pytest.mark.parametrize("output_dtype", ["same", "float32"])
def test_linear_layer(run_op, rng, dtype, epilogue, output_dtype):
    x = rng.standard_normal((2, 5, 33)).astype(dtype)
    weight = rng.standard_normal((7, 33)).astype(dtype)
    bias = rng.standard_normal(7).astype(dtype)
    y = run_op("M3Gemm", x, weight, bias, has_bias=1, epilogue=epilogue, output_dtype=output_dtype)[
        0
    ]
    want = exact(x, weight, bias, epilogue)
    assert y.dtype == (np.float32 if output_dtype == "float32" else dtype)
    assert y.shape == want.shape
    rounding = 2**-8 if y.dtype == BF16 else 0
    assert np.all(np.abs(y.astype(np.float64) - want) <= rounding * np.abs(want) + 1e-5)


def test_gelu_keeps_its_precision_in_the_tails(run_op):
    x = np.linspace(-8, 8, 4001, dtype=np.float32)[:, None]
    one = np.ones((1, 1), np.float32)
    y = run_op("M3Gemm", x, one, has_bias=0, epilogue="gelu_erf", output_dtype="same")[0]
    want = exact(x, one, np.zeros(1), "gelu_erf")
    assert np.abs(y - want).max() < 3e-7


def test_no_rows(run_op):
    x, weight = np.empty((0, 4), BF16), np.ones((3, 4), BF16)
    y = run_op("M3Gemm", x, weight, has_bias=0, epilogue="none", output_dtype="same")[0]
    assert y.shape == (0, 3)
    assert y.dtype == BF16


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        pytest.param(
            {"has_bias": 0, "epilogue": "none"}, r"missing attributes \['output_dtype'\]", id="few"
        ),
        pytest.param(
            {"has_bias": 0, "epilogue": "none", "output_dtype": "same", "alpha": 1},
            r"unknown attributes \['alpha'\]",
            id="many",
        ),
        pytest.param(
            {"has_bias": 0, "epilogue": "relu", "output_dtype": "same"}, "'relu'", id="wrong"
        ),
    ],
)
def test_attributes_are_strict(make_op, attributes, message):
    with pytest.raises(ValueError, match=message):
        make_op("M3Gemm", 2, **attributes)


def test_a_replaced_weight_is_not_mistaken_for_the_old_one(make_op):
    node = make_op("M3Gemm", 2, has_bias=0, epilogue="none", output_dtype="same")
    x = np.ones((1, 2), BF16)
    for value in (1, 2):
        weight = np.full((1, 2), value, BF16)
        assert node.run(None, {"x0": x, "x1": weight})[0] == 2 * value
