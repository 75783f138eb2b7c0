"""Single-node models, and a packed step with everything that may go wrong in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from m3trt.build.configuration import BuildConfig
from m3trt.build.engine_dir import EngineDir
from m3trt.build.environment import Environment
from m3trt.build.library import PLUGIN_LIBRARY
from m3trt.build.network import build_text_network
from m3trt.build.vision_network import build_vision_network
from m3trt.convert.configuration import M3Config, MoeConfig, SparseAttentionConfig, VisionConfig
from m3trt.convert.dtypes import NUMPY_DTYPES
from m3trt.convert.layout import TensorSpec, rank_tensors, vision_tensors
from m3trt.runtime.reference.collectives import Communicator, collective_ops
from m3trt.runtime.reference.program import OPS
from m3trt.runtime.step import StepInputs
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from safetensors.numpy import save_file


@pytest.fixture(scope="session")
def make_op() -> Callable[..., ReferenceEvaluator]:
    """make_op(op_type, inputs, outputs, **attributes) -> an evaluator of that one node."""

    def make(op_type: str, inputs: int, outputs: int = 1, **attributes: Any) -> ReferenceEvaluator:
        names = [f"x{i}" for i in range(inputs)], [f"y{i}" for i in range(outputs)]
        node = helper.make_node(op_type, *names, name="node", domain="m3", **attributes)
        values = [
            [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in group]
            for group in names
        ]
        graph = helper.make_graph([node], "one", *values)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("m3", 1)])
        return ReferenceEvaluator(model, new_ops=[*OPS, *collective_ops(Communicator(1), 0)])

    return make


@pytest.fixture(scope="session")
def run_op(make_op: Callable[..., ReferenceEvaluator]) -> Callable[..., list[Any]]:
    """run_op(op_type, *inputs, outputs=1, **attributes) -> the node's outputs."""

    def run(op_type: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> list[Any]:
        node = make_op(op_type, len(inputs), outputs, **attributes)
        result: list[Any] = node.run(None, {f"x{i}": x for i, x in enumerate(inputs)})
        return result

    return run


@dataclass
class Step:
    """Ragged requests, shuffled pages, one padded decode row, three padding tokens."""

    block: int
    cu_query_lens: Any
    sequence_length: Any
    page_table: Any
    tokens: int
    pages: int

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """(token, request, position) of every real token."""
        cu = self.cu_query_lens
        for r, length in enumerate(self.sequence_length):
            new = cu[r + 1] - cu[r]
            for i in range(new):
                yield int(cu[r] + i), r, int(length - new + i)

    @property
    def positions(self) -> Any:
        positions = np.zeros(self.tokens, np.int32)
        for token, _, position in self.rows():
            positions[token] = position
        return positions

    @property
    def batch(self) -> tuple[Any, Any, Any]:
        return self.cu_query_lens, self.sequence_length, self.page_table

    @property
    def decode_rows(self) -> Any:
        return np.zeros((3, 1), np.int32)

    def slot(self, request: int, position: int) -> tuple[int, int]:
        return int(self.page_table[request, position // self.block]), position % self.block

    def fill(self, cache: Any, lane_axes: int, rng: np.random.Generator) -> Any:
        """NaN everywhere, random values in the slots that sequences use."""
        cache[...] = np.nan
        for r, length in enumerate(self.sequence_length):
            for position in range(length):
                page, slot = self.slot(r, position)
                where = (page, slice(None), slot) if lane_axes == 2 else (page, slot)
                cache[where] = rng.standard_normal(cache[where].shape).astype(cache.dtype)
        return cache


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def step(rng: np.random.Generator) -> Step:
    block = 4
    #         whole prompt, chunk, block - 1, one token; then decode rows, the last one padded
    new = np.array([9, 6, 3, 1, 1, 1, 0])
    length = np.array([9, 17, 3, 1, 12, 13, 0], np.int32)
    pages, used = 40, rng.permutation(40)
    table = np.full((len(new), 6), -1, np.int32)
    for r, total in enumerate(length):
        count = -(-int(total) // block)
        table[r, :count], used = used[:count], used[count:]
    cu = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    return Step(block, cu, length, table, tokens=int(cu[-1]) + 3, pages=pages)


SPARSE_LAYERS = (False, True, True)


def small_config(dtype: str = "bfloat16", tp_size: int = 1) -> M3Config:
    """Three layers with blocks of 4 tokens; eight query heads over four KV heads."""
    return M3Config(
        architecture="MiniMaxM3SparseForConditionalGeneration",
        dtype=dtype,
        vocab_size=64,
        hidden_size=24,
        num_hidden_layers=len(SPARSE_LAYERS),
        num_attention_heads=8,
        num_key_value_heads=4,
        head_size=8,
        intermediate_size=32,
        hidden_act="swigluoai",
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        norm_epsilon=1e-6,
        max_position_embeddings=256,
        rotary_dim=4,
        rotary_base=10000.0,
        sparse_layers=SPARSE_LAYERS,
        moe_layers=SPARSE_LAYERS,
        sparse_attention=SparseAttentionConfig(
            num_index_heads=4,
            index_head_size=8,
            block_size=4,
            top_k=3,
            init_blocks=0,
            local_blocks=1,
        ),
        moe=MoeConfig(
            num_experts=8,
            top_k=2,
            intermediate_size=16,
            shared_intermediate_size=16,
            routed_scaling_factor=2.0,
        ),
        vision=VisionConfig(
            hidden_size=40,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            patch_size=2,
            num_channels=3,
            temporal_patch_size=2,
            spatial_merge_size=2,
            segment_max_frames=4,
            rotary_base=10000.0,
            norm_epsilon=1e-5,
            projector_hidden_size=24,
        ),
        image_token_id=60,
        video_token_id=61,
        bos_token_id=62,
        eos_token_id=63,
        tp_size=tp_size,
    )


@pytest.fixture
def make_engine(tmp_path: Path) -> Callable[..., EngineDir]:
    """make_engine(dtype, tp_size, **build options) -> an engine with random weights."""

    def make(dtype: str = "bfloat16", tp_size: int = 1, **options: Any) -> EngineDir:
        config = small_config(dtype, tp_size)
        environment = Environment.current("reference", PLUGIN_LIBRARY, ())
        limits = BuildConfig.for_model(config, **options)
        engine = EngineDir(tmp_path, config, limits, environment)
        for rank in range(tp_size):
            onnx.save(build_text_network(config, engine.build, rank), engine.onnx(rank))
            write_weights(rank_tensors(config), engine.weights(rank), rank)
        onnx.save(build_vision_network(config), engine.vision_onnx)
        write_weights(vision_tensors(config), engine.vision_weights, 0)
        return engine

    return make


def write_weights(specs: Mapping[str, TensorSpec], path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, spec in specs.items():
        scale = spec.shape[-1] ** -0.5
        values = rng.standard_normal(spec.shape).astype(np.float32) * scale
        tensors[name] = values.astype(NUMPY_DTYPES[spec.dtype])
    save_file(tensors, path)


@pytest.fixture
def step_inputs(step: Step, rng: np.random.Generator) -> Callable[[M3Config], StepInputs]:
    """step_inputs(config) -> `step` with random ids, three of them rows of the prompt table."""

    def make(config: M3Config) -> StepInputs:
        ids = rng.integers(0, config.vocab_size, step.tokens).astype(np.int32)
        ids[2:5] = config.vocab_size + np.arange(3)
        dtype = np.float32 if config.dtype == "float32" else ml_dtypes.bfloat16
        return StepInputs(
            input_ids=ids,
            position_ids=step.positions,
            cu_query_lens=step.cu_query_lens,
            sequence_length=step.sequence_length,
            kv_cache_block_offsets=step.page_table,
            decode_shape=(3, 1),
            logit_rows=np.array([8, 14, 17, 18, 19, 20], np.int32),
            prompt_embedding_table=rng.standard_normal((3, config.hidden_size)).astype(dtype),
        )

    return make
