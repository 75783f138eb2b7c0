"""The emitted graphs: valid, complete, readable, and dynamic where a step is."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from m3trt.build import tensors
from m3trt.build.configuration import BuildConfig
from m3trt.build.graph import SAFETENSORS_DTYPES
from m3trt.build.network import build_text_network
from m3trt.build.vision_network import build_vision_network
from m3trt.convert.hf_config import parse_config
from m3trt.convert.layout import rank_tensors, vision_tensors

pytestmark = pytest.mark.smoke

REAL = Path(__file__).parents[1] / "data" / "minimax_m3_config.json"
CASES = [
    pytest.param({}, {}, id="bf16"),
    pytest.param({"dtype": "float32"}, {}, id="float32"),
    pytest.param({"tp_size": 2}, {}, id="tp2"),
    pytest.param({"tp_size": 8}, {}, id="tp8-replicated-kv"),
    pytest.param({}, {"kv_cache_dtype": "fp8"}, id="kv-fp8"),
    pytest.param({}, {"kv_cache_dtype": "fp8", "index_cache_dtype": "fp8"}, id="both-fp8"),
    pytest.param({"moe_layers": (True, True, False)}, {}, id="moe-apart-from-msa"),
]


def shapes(values):
    """name -> (element type, dims) of graph inputs or outputs."""
    return {
        value.name: (
            value.type.tensor_type.elem_type,
            [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim],
        )
        for value in values
    }


def ops(model, domain="m3"):
    return [node.op_type for node in model.graph.node if node.domain == domain]


@pytest.mark.parametrize(("changes", "limits"), CASES)
def test_text_graph_is_valid_and_its_shapes_agree_with_inference(tiny, changes, limits):
    config = tiny(**changes)
    model = build_text_network(config, BuildConfig.for_model(config, **limits), 0)
    onnx.checker.check_model(model, full_check=True)
    # Fails when a shape or dtype that inference finds differs from the one we wrote.
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    known = shapes([*inferred.graph.value_info, *inferred.graph.output])
    written = {name for node in model.graph.node for name in node.output}
    assert known.keys() == written
    assert all("unk__" not in str(dims) for _, dims in known.values())


@pytest.mark.parametrize(("changes", "limits"), CASES)
def test_weights_are_exactly_the_checkpoints_tensors(tiny, changes, limits):
    config = tiny(**changes)
    model = build_text_network(config, BuildConfig.for_model(config, **limits), 0)
    weights = {k: v for k, v in shapes(model.graph.input).items() if tensors.is_weight(k)}
    assert weights == {
        name: (SAFETENSORS_DTYPES[spec.dtype], list(spec.shape))
        for name, spec in rank_tensors(config).items()
    }


def test_step_inputs_and_outputs(tiny):
    config = tiny()
    model = build_text_network(config, BuildConfig.for_model(config), 0)
    bf16, f32, i32 = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
    kv, index = ["pages", 2, 128, 4, 128], ["pages", 128, 128]
    caches = {f"kv_cache_{layer}": (bf16, kv) for layer in range(3)}
    caches |= {f"index_cache_{layer}": (bf16, index) for layer in (1, 2)}
    step = {k: v for k, v in shapes(model.graph.input).items() if not tensors.is_weight(k)}
    assert step == caches | {
        "input_ids": (i32, ["tokens"]),
        "prompt_embedding_table": (bf16, ["prompt_rows", 64]),
        "position_ids": (i32, ["tokens"]),
        "cu_query_lens": (i32, ["requests+1"]),
        "sequence_length": (i32, ["requests"]),
        "kv_cache_block_offsets": (i32, ["requests", "max_pages"]),
        "decode_rows": (i32, ["decode_requests", "q_len"]),
        "logit_rows": (i32, ["logit_rows"]),
    }
    assert shapes(model.graph.output) == {
        "logits": (f32, ["logit_rows", 512]),
        **{f"{name}_out": kind for name, kind in caches.items()},
    }


def test_fp8_caches_come_with_scales_that_every_reader_takes_last(tiny):
    config = tiny()
    limits = {"kv_cache_dtype": "fp8", "index_cache_dtype": "fp8"}
    model = build_text_network(config, BuildConfig.for_model(config, **limits), 0)
    inputs, e4m3 = shapes(model.graph.input), onnx.TensorProto.FLOAT8E4M3FN
    assert inputs["kv_cache_0"][0] == inputs["index_cache_1"][0] == e4m3
    assert inputs["kv_cache_scale_0"] == (onnx.TensorProto.FLOAT, [1])
    assert "index_cache_scale_0" not in inputs
    last = {node.name: list(node.input)[-2:] for node in model.graph.node}
    assert last["layers.0.attention.cache_update"][1] == "kv_cache_scale_0"
    assert last["layers.1.attention.cache_update"] == ["kv_cache_scale_1", "index_cache_scale_1"]
    assert last["layers.1.attention.block_select"][1] == "index_cache_scale_1"
    assert last["layers.1.attention.sparse_attention"][1] == "kv_cache_scale_1"
    assert last["layers.0.attention.paged_attention"][1] == "kv_cache_scale_0"


def test_layer_maps_choose_attention_and_mlp(tiny):
    model = build_text_network(tiny(), BuildConfig.for_model(tiny()), 0)
    norm, attend = "M3AddRmsNorm", ["M3BlockSelect", "M3SparseAttention"]
    dense = [norm, "M3Gemm", "M3CacheUpdate", "M3PagedAttention", "M3Gemm"]
    dense += [norm, "M3Gemm", "M3Gemm"]
    sparse = [norm, "M3Gemm", "M3CacheUpdate", *attend, "M3Gemm", norm, "M3MoE"]
    assert ops(model) == ["M3Embedding", *dense, *sparse, *sparse, norm, "M3Gemm"]


def test_additions_and_norms_are_one_op(tiny):
    """The first norm has nothing to add, the last one only the rows whose logits are asked for."""
    model = build_text_network(tiny(), BuildConfig.for_model(tiny()), 0)
    norms = [node for node in model.graph.node if node.op_type == "M3AddRmsNorm"]
    assert len(norms) == 2 * tiny().num_hidden_layers + 1
    streams = [node.input[1] for node in norms[1:]]
    sums = [node.output[1] for node in norms[1:-1]]
    assert streams == ["embedding", *sums], "each adds to the sum of the one before"
    assert norms[0].input[0] == "embedding"
    assert norms[-1].input[-1] == "logit_rows"
    assert {len(node.output) for node in (norms[0], norms[-1])} == {1}
    standard = {node.op_type for node in model.graph.node if node.domain == ""}
    assert not standard & {"ReduceMean", "Gather"}


def test_ranks_share_one_graph_and_reduce_twice_a_layer(tiny):
    config = tiny(tp_size=2)
    build = BuildConfig.for_model(config)
    model = build_text_network(config, build, 0)
    assert model == build_text_network(config, build, 1)
    assert ops(model).count("M3AllReduce") == 2 * config.num_hidden_layers
    assert ops(model)[-1] == "M3AllGather"
    with pytest.raises(ValueError, match="rank 2 does not exist"):
        build_text_network(config, build, 2)


def test_attributes_are_the_plugins_fields(tiny):
    model = build_text_network(tiny(), BuildConfig.for_model(tiny()), 0)
    found = {
        node.name: {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        for node in model.graph.node
        if node.domain == "m3"
    }
    assert found["layers.0.attention.qkv"] == {
        "has_bias": 0,
        "epilogue": b"none",
        "output_dtype": b"same",
    }
    assert found["logits"]["output_dtype"] == b"float32"
    cache_update = {
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_size": 128,
        "index_head_size": 128,
        "rotary_dim": 64,
        "epsilon": pytest.approx(1e-6),
    }
    assert found["layers.0.attention.cache_update"] == {**cache_update, "num_index_heads": 0}
    assert found["layers.1.attention.cache_update"] == {**cache_update, "num_index_heads": 4}
    assert found["layers.1.attention.block_select"] == {
        "block_size": 128,
        "top_k": 16,
        "init_blocks": 0,
        "local_blocks": 1,
    }
    scale = pytest.approx(128**-0.5)
    assert found["layers.1.attention.sparse_attention"] == {
        "block_size": 128,
        "softmax_scale": scale,
    }
    assert found["layers.1.mlp.moe"] == {
        "expert_parts": 1,
        "top_k": 2,
        "routed_scaling_factor": 2.0,
        "swiglu_alpha": pytest.approx(1.702),
        "swiglu_limit": 7.0,
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_vision_graph(tiny, dtype):
    config = tiny(dtype=dtype)
    model = build_vision_network(config)
    onnx.checker.check_model(model, full_check=True)
    onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    inputs, element = shapes(model.graph.input), onnx.TensorProto.DataType.Value
    kind = element("BFLOAT16" if dtype == "bfloat16" else "FLOAT")
    weights = {k: v for k, v in inputs.items() if tensors.is_weight(k)}
    assert weights == {
        name: (SAFETENSORS_DTYPES[spec.dtype], list(spec.shape))
        for name, spec in vision_tensors(config).items()
    }
    assert {k: v for k, v in inputs.items() if k not in weights} == {
        "patches": (kind, ["patches", 1176]),
        "positions": (element("INT32"), ["patches", 3]),
        "cu_seqlens": (element("INT32"), ["segments+1"]),
    }
    assert shapes(model.graph.output) == {"features": (kind, ["features", 64])}
    assert ops(model).count("M3VarlenAttention") == 2


def test_model_without_vision_has_no_vision_graph(tiny):
    with pytest.raises(ValueError, match="no vision tower"):
        build_vision_network(tiny(vision=None))


def test_names_are_readable_and_unique(tiny):
    for model in (
        build_text_network(tiny(), BuildConfig.for_model(tiny()), 0),
        build_vision_network(tiny()),
    ):
        names = [node.name for node in model.graph.node]
        assert len(set(names)) == len(names)
        assert all(name and not name.isdigit() for name in names)
        for node in model.graph.node:
            if len(node.output) == 1:
                assert node.output[0] == node.name


@pytest.mark.parametrize(("tp_size", "parts"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_released_model(tp_size, parts):
    config = parse_config(json.loads(REAL.read_text()), {}, tp_size=tp_size)
    model = build_text_network(config, BuildConfig.for_model(config), 0)
    onnx.checker.check_model(model, full_check=True)
    moe = next(node for node in model.graph.node if node.op_type == "M3MoE")
    assert len(moe.input) == 4 + 2 * parts + 2
    assert ops(model).count("M3SparseAttention") == 57
    assert ops(model).count("M3PagedAttention") == 3
