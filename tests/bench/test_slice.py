"""The parts of the GPU benches that need no GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest
from m3trt.bench import random_engine
from m3trt.bench.device_time import Kernel, divide, op_of
from m3trt.bench.floors import floor_fields, step_floors
from m3trt.bench.gemm import projections
from m3trt.bench.routing import emulated_experts, expected_experts
from m3trt.bench.slice import CASES, Case, model, page_count, step_inputs
from m3trt.build.configuration import BuildConfig
from m3trt.build.network import build_text_network
from m3trt.convert.layout import rank_tensors

pytestmark = pytest.mark.smoke

MODEL = Path(__file__).resolve().parents[1] / "data" / "minimax_m3_config.json"


def test_the_models():
    rank, part = model("rank", MODEL), model("slice", MODEL)
    assert (rank.num_hidden_layers, rank.tp_size, rank.vision) == (60, 8, None)
    assert (part.num_hidden_layers, part.tp_size, sum(part.moe_layers)) == (6, 1, 5)
    assert random_engine.page_bytes(rank) == 60 * 65536 + 57 * 32768


def test_collectives_are_dropped():
    config = model("rank", MODEL)
    config = dataclasses.replace(
        config, num_hidden_layers=4, sparse_layers=(False, *[True] * 3), moe_layers=(False,) * 4
    )
    graph = build_text_network(config, BuildConfig.for_model(config), 0)
    before = len(graph.graph.node)
    random_engine.drop_collectives(graph, config.local_vocab_size)
    assert len(graph.graph.node) == before - 4 * 2 - 1
    assert not [n for n in graph.graph.node if n.op_type in random_engine.COLLECTIVES]
    made = [name for node in graph.graph.node for name in node.output]
    given = {x.name for x in [*graph.graph.input, *graph.graph.initializer]} | set(made)
    assert len(made) == len(set(made))
    assert {name for node in graph.graph.node for name in node.input} <= given
    assert {x.name for x in graph.graph.output} <= given
    (logits,) = (x for x in graph.graph.output if x.name == "logits")
    assert logits.type.tensor_type.shape.dim[1].dim_value == 200064 // 8
    onnx.load_from_string(graph.SerializeToString())


@pytest.mark.parametrize("kind", CASES)
def test_steps_fit_the_engine(kind):
    config = model(kind, MODEL)
    for case in CASES[kind]:
        inputs, shared = step_inputs(case, config, pages=100, width=1200)
        assert inputs.sequence_length.tolist() == [case.context + case.new] * case.requests
        assert inputs.input_ids.size == inputs.cu_query_lens[-1] == case.requests * case.new
        assert shared == (case.requests * -(-(case.context + case.new) // 128) > 100)
        used = inputs.kv_cache_block_offsets[0, : -(-(case.context + case.new) // 128)]
        assert used.min() >= 0
        assert used.max() < 100
        assert inputs.position_ids[0] == case.context
        assert inputs.position_ids[-1] == case.context + case.new - 1


@pytest.fixture(scope="module")
def narrow():
    """The slice with a twentieth of every width and all experts, and its random weights."""
    torch = pytest.importorskip("torch")
    config = model("slice", MODEL)
    moe = dataclasses.replace(config.moe, intermediate_size=160, shared_intermediate_size=160)
    sizes = {"hidden_size": 320, "intermediate_size": 640, "vocab_size": 1024}
    config = dataclasses.replace(config, moe=moe, dtype="float32", **sizes)
    specs = rank_tensors(config)
    fill = random_engine.fill
    return config, {name: fill(name, torch.empty(spec.shape)) for name, spec in specs.items()}


@pytest.mark.parametrize("tokens", [8, 32])
def test_tokens_choose_experts_as_at_random(narrow, tokens):
    config, weights = narrow
    expected, ids = expected_experts(config, tokens), np.arange(tokens)
    assert emulated_experts(weights, config, ids) == pytest.approx(expected, rel=0.04)
    biased = {n: w * 100 if n.endswith("correction_bias") else w for n, w in weights.items()}
    assert emulated_experts(biased, config, ids) < 0.8 * expected, "biases of 0.1 herd them"


def test_a_swiglu_adds_nothing_that_all_tokens_share(narrow):
    _, weights = narrow
    projections = [weight for name, weight in weights.items() if ".proj." in name]
    assert len(projections) == 1 + 5 * 2
    assert all(weight.sum(-1).abs().max() < 1e-4 for weight in projections)


def test_pages_share_the_memory():
    config = model("rank", MODEL)
    limits = BuildConfig.for_model(config)
    pages = page_count(config, limits, CASES["rank"], free=141 << 30)
    assert 1000 < pages < 32 * 481
    assert page_count(config, limits, [Case(1, 127)], free=141 << 30) == 1


def test_floors_of_one_decode_step():
    floors = step_floors(model("slice", MODEL), requests=1, context=131071, new=1)
    assert floors["PagedAttention"].seconds == pytest.approx(131072 * 2 * 4 * 128 * 2 / 4.69e12)
    assert floors["BlockSelect"].seconds == pytest.approx(5 * 131072 * 128 * 2 / 4.69e12)
    assert floors["SparseAttention"].seconds == pytest.approx(5 * 2048 * 2 * 4 * 128 * 2 / 4.69e12)
    expert = 3 * 3072 * 6144 * 2
    assert floors["MoE"].seconds == pytest.approx(5 * (5 * expert + 128 * 6144 * 4) / 4.69e12)
    prefill = step_floors(model("slice", MODEL), requests=1, context=0, new=8192)
    assert prefill["MoE"].amount > 5 * 8192 * 5 * 3 * 2 * 3072 * 6144
    assert prefill["MoE"].unit == "flops"
    heads = 6 * (64 + 2 * 4) + 5 * (4 + 1)
    assert prefill["CacheUpdate"].seconds == pytest.approx(2 * 8192 * heads * 128 * 2 / 4.2e12)
    fields = floor_fields(prefill)
    assert np.isfinite(list(fields["floors"].values())).all()
    assert fields["floor_seconds"] == pytest.approx(sum(fields["floors"].values()))
    assert fields["work"]["MoE"] == {"amount": prefill["MoE"].amount, "unit": "flops"}


def test_floors_of_collectives():
    config = dataclasses.replace(model("slice", MODEL), tp_size=2)
    floors = step_floors(config, requests=8, context=1024, new=1, collectives=True)
    assert floors["AllReduce"].seconds == pytest.approx(6 * 2 * 8 * 6144 * 2 / 450e9)
    assert floors["AllGather"].seconds == pytest.approx(8 * 200064 * 4 / 2 / 450e9)
    assert "AllReduce" not in step_floors(config, requests=8, context=1024, new=1)
    alone = dataclasses.replace(config, tp_size=1)
    assert "AllReduce" not in step_floors(alone, 8, 1024, 1, collectives=True)


def test_kernels_belong_to_ops():
    assert op_of("void m3::kernels::paged_attention_kernel<float>()") == "PagedAttention"
    selected = (
        "m3::kernels::selected_decode_kernel<__nv_bfloat16, true>(PagedDecodeParams, BulkMaps)"
    )
    assert op_of(selected) == "SparseAttention"
    page = "m3::kernels::page_decode_kernel<__nv_bfloat16>(PagedDecodeParams, BulkMaps, int)"
    assert op_of(page) == "SparseAttention"
    assert op_of("m3::kernels::merge_kernel(PagedDecodeParams, int, Workspace)") == "PagedAttention"
    assert op_of("m3::kernels::select_top_kernel(BlockSelectParams, SelectRound)") == "BlockSelect"
    assert op_of("m3::kernels::fill_kernel(InvertParams, InvertedBlocks, int)") == "SparseAttention"
    assert op_of("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT") == "Gemm"
    assert op_of("__myl_CasMulMeaAddSqr") == "TensorRT"


def test_what_a_kernel_waits_for_is_not_counted_twice():
    norm, gemm = "m3::add_rms_norm", "nvjet_tst"
    kernels = [Kernel(gemm, 9, 30), Kernel(norm, 0, 10), Kernel(norm, 5, 34), Kernel("x", 40, 41)]
    found = divide(kernels)
    assert list(found) == ["Gemm", "AddRmsNorm", "TensorRT"]
    assert found["AddRmsNorm"] == pytest.approx(
        {"seconds": 39e-6, "added_seconds": 14e-6, "launches": 2}
    )
    assert found["Gemm"] == pytest.approx({"seconds": 21e-6, "added_seconds": 2e-5, "launches": 1})
    assert sum(op["added_seconds"] for op in found.values()) == pytest.approx(35e-6)


def test_every_projection_is_measured():
    shapes = projections(model("rank", MODEL))
    assert set(shapes.values()) == {
        *((1536, 6144), (1280, 6144), (6144, 1024), (3072, 6144), (6144, 1536), (25008, 6144))
    }
