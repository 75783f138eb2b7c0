"""M3AddRmsNorm: builds everywhere; on a GPU its results against fp64."""

from __future__ import annotations

import plugin_harness as harness
import pytest
import torch
from closeness import DTYPES, check_sums, normal
from plugin_harness import Node, Port
from torch import Tensor

EPSILON = 1e-6
FORMS = {"alone": (0, 0), "added": (1, 0), "rows": (0, 1), "added-rows": (1, 1)}
"""has_residual, has_rows."""
SIZES = {  # rows of x, columns
    "empty": (0, 64),
    "one-row": (1, 6144),
    "narrow": (5, 8),
    "odd": (33, 1032),
    "many": (1100, 6144),
}


def node(dtype: str, form: str, columns: int) -> Node:
    residual, rows = FORMS[form]
    x = Port("x", dtype, ("tokens", columns))
    inputs = [x, Port("weight", "f32", (columns,))]
    outputs = [Port("normed", dtype, ("requests" if rows else "tokens", columns))]
    if residual:
        inputs.insert(1, Port("residual", dtype, x.shape))
    if rows:
        inputs.append(Port("rows", "int32", ("requests",)))
    elif residual:
        outputs.append(Port("sum", dtype, x.shape))
    fields = ("has_residual", residual), ("has_rows", rows), ("epsilon", EPSILON)
    return Node("M3AddRmsNorm", tuple(inputs), tuple(outputs), fields)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_builds(form: str, dtype: str) -> None:
    assert harness.build(node(dtype, form, 64)).nbytes > 0


ADDED, ROWS = node("bf16", "added", 64), node("bf16", "rows", 64)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        pytest.param(ADDED.but(epsilon=None), "'epsilon' is missing", id="missing"),
        pytest.param(ADDED.but(has_rows=1), "3 inputs are connected", id="rows-missing"),
        pytest.param(ADDED.retyped(weight="bf16"), "weight=bf16", id="weight-type"),
        pytest.param(ADDED.retyped(residual="f32"), "residual=f32", id="mixed"),
        pytest.param(ROWS.retyped(rows="f32"), "rows=f32", id="rows-type"),
        pytest.param(ADDED.reshaped(x=("tokens", 60)), "a multiple of 8", id="columns"),
        pytest.param(node("bf16", "added", 0), "a multiple of 8", id="no-columns"),
        pytest.param(node("bf16", "added", 24584), "8 columns, up to 24576", id="long"),
        pytest.param(node("f32", "alone", 12296), "8 columns, up to 12288", id="long-f32"),
        pytest.param(ADDED.reshaped(residual=("tokens", 72)), "both take the same", id="residual"),
        pytest.param(ADDED.reshaped(weight=(72,)), "weight has shape [72]", id="weight"),
        pytest.param(ADDED.reshaped(x=("tokens", 8, 8)), "it takes 2 dimensions", id="rank"),
    ],
)
def test_refuses(bad: Node, sentence: str) -> None:
    with pytest.raises(harness.BuildError) as caught:
        harness.build(bad)
    assert sentence in str(caught.value)


def norm(total: Tensor, weight: Tensor) -> Tensor:
    factor = torch.rsqrt(total.square().mean(-1, keepdim=True) + EPSILON)
    return total * factor * weight


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_norm_of_the_rounded_sum(size: str, form: str, dtype: str) -> None:
    (has_residual, has_rows), (count, columns) = FORMS[form], SIZES[size]
    kind = DTYPES[dtype]
    inputs = {"x": normal(1, count, columns, scale=3.0).to(kind), "weight": normal(2, columns) + 1}
    total = inputs["x"]
    if has_residual:
        inputs["residual"] = normal(3, count, columns, scale=30.0).to(kind)
        total = total + inputs["residual"]  # torch rounds it once, as the op does
    if has_rows:
        chosen = torch.randint(0, max(count, 1), (min(count, 64),)).to(torch.int32)
        inputs["rows"], total = chosen, total[chosen.long()]
    out = harness.run(node(dtype, form, columns), inputs)
    if has_residual and not has_rows:
        assert harness.same_bits(out["sum"], total)
    exact = norm(total.double(), inputs["weight"].double())
    baseline = norm(total, inputs["weight"].to(kind))
    check_sums(out["normed"], exact, baseline, terms=columns)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")
def test_rows_of_zeros_stay_zero() -> None:
    x = torch.zeros(3, 64, dtype=torch.bfloat16)
    out = harness.run(node("bf16", "alone", 64), {"x": x, "weight": torch.ones(64)})["normed"]
    assert not out.any()
