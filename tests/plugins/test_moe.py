"""M3MoE: builds everywhere; on a GPU its results against fp64."""

from __future__ import annotations

from dataclasses import dataclass

import plugin_harness as harness
import pytest
import torch
from closeness import DTYPES, check_sums, normal
from plugin_harness import Node, Port
from torch import Tensor

ALPHA, LIMIT, SCALE = 1.702, 7.0, 2.0


@dataclass(frozen=True)
class Shape:
    dtype: str
    hidden: int
    experts: int
    top_k: int
    width: int
    shared_width: int
    parts: int = 1


SHAPES = {
    "bf16": Shape("bf16", 256, 128, 4, 192, 192),
    "f32": Shape("f32", 128, 16, 4, 96, 64),
    "bf16-parts": Shape("bf16", 128, 32, 8, 64, 96, parts=4),
    "odd-bf16": Shape("bf16", 70, 6, 3, 37, 21, parts=2),
    "odd-f32": Shape("f32", 35, 5, 5, 33, 20),
    "one-expert": Shape("bf16", 64, 1, 1, 32, 32),
    "crowded": Shape("bf16", 128, 8, 4, 128, 128),
}
STEPS = {  # real tokens, padding
    "empty": (0, 0),
    "only-padding": (0, 5),
    "decode": (1, 0),
    "decode-few": (5, 3),
    "decode-padded": (7, 9),
    "context": (333, 3),
    "two-slabs": (4100, 30),
}


def node(s: Shape) -> Node:
    each = s.experts // s.parts
    inputs = [
        Port("x", s.dtype, ("tokens", s.hidden)),
        Port("cu_query_lens", "int32", ("requests+1",)),
        Port("router_weight", "f32", (s.experts, s.hidden)),
        Port("router_bias", "f32", (s.experts,)),
        *(Port(f"fc{i}", s.dtype, (each, 2 * s.width, s.hidden)) for i in range(s.parts)),
        *(Port(f"proj{i}", s.dtype, (each, s.hidden, s.width)) for i in range(s.parts)),
        Port("shared_fc", s.dtype, (2 * s.shared_width, s.hidden)),
        Port("shared_proj", s.dtype, (s.hidden, s.shared_width)),
    ]
    attributes = (
        ("expert_parts", s.parts),
        ("top_k", s.top_k),
        ("routed_scaling_factor", SCALE),
        ("swiglu_alpha", ALPHA),
        ("swiglu_limit", LIMIT),
    )
    out = Port("y", s.dtype, ("tokens", s.hidden))
    return Node("M3MoE", tuple(inputs), (out,), attributes)


@pytest.mark.smoke
@pytest.mark.parametrize("shape", SHAPES)
def test_builds(shape: str) -> None:
    assert harness.build(node(SHAPES[shape])).nbytes > 0


BF16 = node(SHAPES["bf16"])


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        pytest.param(BF16.but(expert_parts=2), "expert_parts=2 takes 10", id="parts"),
        pytest.param(BF16.but(swiglu_limit=None), "'swiglu_limit' is missing", id="missing"),
        pytest.param(
            node(Shape("bf16", 64, 4, 4, 32, 32)).but(top_k=5), "there are 4 experts", id="top-k"
        ),
        pytest.param(BF16.retyped(router_weight="bf16"), "router_weight=bf16", id="router-type"),
        pytest.param(BF16.retyped(fc0="f32"), "fc.part0=f32", id="mixed"),
        pytest.param(
            BF16.reshaped(proj0=(128, 256, 96)), "input proj.part0 has shape", id="proj-shape"
        ),
        pytest.param(
            BF16.reshaped(router_bias=(64,)), "input router_bias has shape [64]", id="bias-shape"
        ),
        pytest.param(
            BF16.reshaped(shared_proj=(192, 256)), "input shared_proj has shape", id="transposed"
        ),
    ],
)
def test_refuses(bad: Node, sentence: str) -> None:
    with pytest.raises(harness.BuildError) as caught:
        harness.build(bad)
    assert sentence in str(caught.value)


def make_inputs(s: Shape, real: int, padding: int) -> dict[str, Tensor]:
    """Weights so large that both clamps of SwiGLU bite; NaN in the padding rows."""
    dtype = DTYPES[s.dtype]
    x = normal(1, real + padding, s.hidden).to(dtype)
    x[real:] = float("nan")
    each = s.experts // s.parts
    inputs = {
        "x": x,
        "cu_query_lens": torch.tensor([0, real // 2, real], dtype=torch.int32),
        "router_weight": normal(2, s.experts, s.hidden, scale=s.hidden**-0.5),
        "router_bias": normal(3, s.experts, scale=0.2),
        "shared_fc": normal(4, 2 * s.shared_width, s.hidden, scale=4 * s.hidden**-0.5).to(dtype),
        "shared_proj": normal(5, s.hidden, s.shared_width, scale=s.shared_width**-0.5).to(dtype),
    }
    for i in range(s.parts):
        fc = normal(10 + i, each, 2 * s.width, s.hidden, scale=4 * s.hidden**-0.5)
        inputs[f"fc{i}"] = fc.to(dtype)
        proj = normal(20 + i, each, s.hidden, s.width, scale=s.width**-0.5)
        inputs[f"proj{i}"] = proj.to(dtype)
    return inputs


def expert(x: Tensor, fc: Tensor, proj: Tensor) -> Tensor:
    gate, up = (x @ fc.T).chunk(2, -1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (gate * torch.sigmoid(ALPHA * gate) * (up + 1)) @ proj.T


def formula(s: Shape, inputs: dict[str, Tensor], chosen: Tensor, weights: Tensor) -> Tensor:
    """The mixture in the dtype of `inputs`, for given experts [tokens, top_k] and weights."""
    x = inputs["x"]
    fc = torch.cat([inputs[f"fc{i}"] for i in range(s.parts)])
    proj = torch.cat([inputs[f"proj{i}"] for i in range(s.parts)])
    y = expert(x, inputs["shared_fc"], inputs["shared_proj"])
    for e in range(s.experts):
        token, slot = (chosen == e).nonzero(as_tuple=True)
        routed = expert(x[token], fc[e], proj[e]) * weights[token, slot, None].to(x.dtype)
        y = y.index_add(0, token, routed)
    return y


def check_mixture(s: Shape, inputs: dict[str, Tensor], real: int) -> None:
    """Runs the plugin and compares the rows of real tokens with fp64; the others are zeros."""
    y = harness.run(node(s), inputs)["y"].to(inputs["x"].device)
    assert (y[real:] == 0).all()

    wide = {name: tensor.double() for name, tensor in inputs.items()}
    wide["x"] = wide["x"][:real]
    probabilities = torch.sigmoid(wide["x"] @ wide["router_weight"].T)
    scores, order = (probabilities + wide["router_bias"]).sort(-1, descending=True)
    chosen = order[:, : s.top_k]
    weights = probabilities.gather(-1, chosen)
    weights = SCALE * weights / weights.sum(-1, keepdim=True)
    # Where the last chosen and the first rejected expert tie within fp32, either is right.
    sure = torch.ones(real, dtype=torch.bool, device=y.device)
    if s.top_k < s.experts:
        sure = scores[:, s.top_k - 1] - scores[:, s.top_k] > 1e-5
    assert real == 0 or sure.double().mean() > 0.95

    exact = formula(s, wide, chosen, weights)
    plain = {name: tensor.to(DTYPES[s.dtype]) for name, tensor in wide.items()}
    baseline = formula(s, plain, chosen, weights)
    check_sums(y[:real][sure], exact[sure], baseline[sure], terms=s.hidden + s.width)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("step", STEPS)
def test_is_exact_mixture(step: str, shape: str) -> None:
    s = SHAPES[shape]
    real, padding = STEPS[step]
    check_mixture(s, make_inputs(s, real, padding), real)


REAL_WIDTHS = {  # of the released model, with fewer experts
    "rank-of-8": Shape("bf16", 6144, 32, 4, 384, 384),
    "rank-of-4": Shape("bf16", 6144, 16, 4, 768, 768),
    "whole": Shape("bf16", 6144, 8, 4, 3072, 3072, parts=4),
}


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")
@pytest.mark.parametrize("hot", [False, True], ids=["random", "hot-expert"])
@pytest.mark.parametrize("tokens", [1, 5, 9, 50, 70, 700, 4100])
@pytest.mark.parametrize("shape", REAL_WIDTHS)
def test_real_widths(shape: str, tokens: int, hot: bool) -> None:
    """Decode steps, every shape and tile width of the GEMMs, tiles cut along K, experts with no
    token and with all.
    """
    s = REAL_WIDTHS[shape]
    torch.cuda.manual_seed(tokens)
    inputs = {}
    for port in node(s).inputs:
        if port.name == "cu_query_lens":
            inputs[port.name] = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
            continue
        size = [tokens + 3 if dim == "tokens" else int(dim) for dim in port.shape]
        scale = 1.0 if port.name == "x" else (4 if "fc" in port.name else 1) * size[-1] ** -0.5
        values = torch.randn(size, device="cuda") * scale
        inputs[port.name] = values.to(DTYPES[port.dtype])
    inputs["x"][tokens:] = torch.nan
    inputs["router_bias"].zero_()
    if hot:
        inputs["router_bias"][:4] = torch.tensor([-9.0, 9.0, -9.0, -9.0])
    check_mixture(s, inputs, tokens)


@pytest.mark.gpu
@pytest.mark.full
@pytest.mark.skipif(bool(harness.gpu_missing()), reason=harness.gpu_missing() or "-")
def test_ties_go_to_the_lower_expert() -> None:
    """Equal scores everywhere: the first top_k experts are chosen, with equal weights."""
    s = Shape("f32", 32, 8, 2, 16, 16)
    inputs = make_inputs(s, real=5, padding=0)
    inputs["router_weight"].zero_()
    inputs["router_bias"].zero_()
    y = harness.run(node(s), inputs)["y"]
    chosen = torch.tensor([[0, 1]]).expand(5, 2)
    weights = torch.full((5, 2), SCALE / 2)
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    exact = formula(s, wide, chosen, weights.double())
    check_sums(y, exact, formula(s, inputs, chosen, weights), terms=48)
