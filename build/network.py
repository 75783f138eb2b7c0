"""The text model of one rank as an ONNX graph: the only definition of the model.

Weights are graph inputs with the names, shapes and dtypes of `rank{r}.safetensors`
(`convert.layout.rank_tensors`), bound once at load. The graph holds no rank number: what differs
between ranks is only what their weights contain.
"""

from __future__ import annotations

import numpy as np
import onnx
from m3trt.build import ops, patterns, tensors
from m3trt.build.configuration import BuildConfig, CacheDtype
from m3trt.build.graph import MODEL_DTYPES, SAFETENSORS_DTYPES, Dim, GraphBuilder, Tensor
from m3trt.build.ops import Batch, Cache
from m3trt.convert.configuration import M3Config
from m3trt.convert.layout import expert_stack, rank_tensors
from onnx import TensorProto


def build_text_network(config: M3Config, build: BuildConfig, rank: int) -> onnx.ModelProto:
    """The step of `tensors.py` for one rank; equal for all ranks of a config.

    Raises:
        ValueError: `rank` is not one of the config's ranks.
    """
    if not 0 <= rank < config.tp_size:
        raise ValueError(f"rank {rank} does not exist: the checkpoint has tp_size {config.tp_size}")
    return _TextNetwork(config, build).model()


class _TextNetwork:
    def __init__(self, config: M3Config, build: BuildConfig) -> None:
        self.config = config
        self.graph = graph = GraphBuilder()
        self.dtype = MODEL_DTYPES[config.dtype]
        self.input_ids = graph.input(tensors.INPUT_IDS, TensorProto.INT32, ["tokens"])
        self.prompt_table = graph.input(
            tensors.PROMPT_EMBEDDING_TABLE, self.dtype, ["prompt_rows", config.hidden_size]
        )
        self.batch = Batch(
            *(
                graph.input(name, TensorProto.INT32, shape)
                for name, shape in (
                    (tensors.POSITION_IDS, ["tokens"]),
                    (tensors.CU_QUERY_LENS, ["requests+1"]),
                    (tensors.SEQUENCE_LENGTH, ["requests"]),
                    (tensors.KV_CACHE_BLOCK_OFFSETS, ["requests", "max_pages"]),
                    (tensors.DECODE_ROWS, ["decode_requests", "q_len"]),
                )
            )
        )
        self.logit_rows = graph.input(tensors.LOGIT_ROWS, TensorProto.INT32, ["logit_rows"])
        self.kv_caches = [
            self._kv_cache(layer, build.kv_cache_dtype) for layer in range(config.num_hidden_layers)
        ]
        self.index_caches = [
            self._index_cache(layer, build.index_cache_dtype) if sparse else None
            for layer, sparse in enumerate(config.sparse_layers)
        ]
        for name, spec in rank_tensors(config).items():
            graph.input(name, SAFETENSORS_DTYPES[spec.dtype], spec.shape)
        pairs = np.arange(0, config.rotary_dim, 2, dtype=np.float64)
        inv_freq = float(config.rotary_base) ** (-pairs / config.rotary_dim)
        self.inv_freq = graph.constant("constants.inv_freq", inv_freq.astype(np.float32))

    def _kv_cache(self, layer: int, dtype: CacheDtype) -> Cache:
        config = self.config
        heads = config.local_num_key_value_heads
        shape: list[Dim] = ["pages", 2, config.tokens_per_block, heads, config.head_size]
        return self._cache(tensors.kv_cache(layer), shape, dtype, tensors.kv_cache_scale(layer))

    def _index_cache(self, layer: int, dtype: CacheDtype) -> Cache:
        sparse = self.config.sparse_attention
        shape: list[Dim] = ["pages", self.config.tokens_per_block, sparse.index_head_size]
        name = tensors.index_cache(layer)
        return self._cache(name, shape, dtype, tensors.index_cache_scale(layer))

    def _cache(self, name: str, shape: list[Dim], dtype: CacheDtype, scale_name: str) -> Cache:
        if dtype == "auto":
            return Cache(self.graph.input(name, self.dtype, shape), None)
        pages = self.graph.input(name, TensorProto.FLOAT8E4M3FN, shape)
        return Cache(pages, self.graph.input(scale_name, TensorProto.FLOAT, [1]))

    def model(self) -> onnx.ModelProto:
        words = self.graph["transformer.vocab_embedding.weight"]
        branch = ops.embedding(self.graph, "embedding", self.input_ids, words, self.prompt_table)
        stream: Tensor | None = None
        for layer in range(self.config.num_hidden_layers):
            branch, stream = self._decoder_layer(layer, branch, stream)
        caches = [c.after_update().pages for c in self.kv_caches]
        caches += [c.after_update().pages for c in self.index_caches if c is not None]
        return self.graph.model("minimax_m3_text", [self._logits(branch, stream), *caches])

    def _decoder_layer(
        self, layer: int, branch: Tensor, stream: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Takes and returns the last MLP's output and the residual stream that it is yet to be
        added to: each addition is part of the norm behind it."""
        config, name = self.config, f"layers.{layer}"
        normed, stream = self._norm(layer, "input_layernorm", branch, stream)
        attended = self._all_reduce(f"{name}.attention", self._attention(layer, normed))
        normed, stream = self._norm(layer, "post_layernorm", attended, stream)
        mlp = self._moe if config.moe_layers[layer] else self._dense_mlp
        return self._all_reduce(f"{name}.mlp", mlp(layer, normed)), stream

    def _all_reduce(self, name: str, x: Tensor) -> Tensor:
        return ops.all_reduce(self.graph, f"{name}.all_reduce", x, self.config.tp_size)

    def _attention(self, layer: int, x: Tensor) -> Tensor:
        config, graph, name = self.config, self.graph, f"layers.{layer}.attention"
        sparse = config.sparse_attention
        kv, index = self.kv_caches[layer], self.index_caches[layer]
        norms = self._weights(layer, "attention", "q_layernorm.weight", "k_layernorm.weight")
        index_norms = None
        if index is not None:
            index_norms = self._weights(
                layer, "attention", "index_q_layernorm.weight", "index_k_layernorm.weight"
            )
        qkv = ops.gemm(graph, f"{name}.qkv", x, self._weight(layer, "attention.qkv.weight"))
        q, index_q = ops.cache_update(
            graph,
            f"{name}.cache_update",
            qkv,
            self.batch,
            self.inv_freq,
            kv,
            norms,
            index,
            index_norms,
            config.local_num_attention_heads,
            config.rotary_dim,
            float(config.norm_epsilon),
        )
        block_ids = None
        if index is not None and index_q is not None:
            block_ids = ops.block_select(
                graph,
                f"{name}.block_select",
                index_q,
                index.after_update(),
                self.batch,
                sparse.block_size,
                sparse.top_k,
                sparse.init_blocks,
                sparse.local_blocks,
            )
        attended = ops.attention(
            graph,
            f"{name}.paged_attention" if block_ids is None else f"{name}.sparse_attention",
            q,
            kv.after_update(),
            block_ids,
            self.batch,
            config.head_size**-0.5,
        )
        weight = self._weight(layer, "attention.dense.weight")
        return ops.gemm(graph, f"{name}.dense", attended, weight)

    def _dense_mlp(self, layer: int, x: Tensor) -> Tensor:
        config, graph, name = self.config, self.graph, f"layers.{layer}.mlp"
        fc, proj = self._weights(layer, "mlp", "fc.weight", "proj.weight")
        both = ops.gemm(graph, f"{name}.fc", x, fc)
        activated = patterns.swiglu(
            graph, f"{name}.swiglu", both, config.swiglu_alpha, config.swiglu_limit
        )
        return ops.gemm(graph, f"{name}.proj", activated, proj)

    def _moe(self, layer: int, x: Tensor) -> Tensor:
        config = self.config
        parts = range(config.expert_parts)
        return ops.moe(
            self.graph,
            f"layers.{layer}.mlp.moe",
            x,
            self.batch.cu_query_lens,
            self._weights(layer, "mlp", "router.weight", "router.e_score_correction_bias"),
            [self._weight(layer, expert_stack("mlp.fc", j, len(parts))) for j in parts],
            [self._weight(layer, expert_stack("mlp.proj", j, len(parts))) for j in parts],
            self._weights(layer, "mlp.shared_expert", "fc.weight", "proj.weight"),
            config.moe.top_k,
            float(config.moe.routed_scaling_factor),
            float(config.swiglu_alpha),
            float(config.swiglu_limit),
        )

    def _logits(self, branch: Tensor, stream: Tensor | None) -> Tensor:
        config, graph = self.config, self.graph
        weight = graph["transformer.ln_f.weight"]
        normed, _ = ops.add_rms_norm(
            graph, "ln_f", branch, stream, weight, config.norm_epsilon, self.logit_rows
        )
        head = graph["lm_head.weight"]
        one_rank = config.tp_size == 1
        name = tensors.LOGITS if one_rank else "lm_head"
        local = ops.gemm(graph, name, normed, head, output_dtype="float32")
        return ops.all_gather(graph, tensors.LOGITS, local, config.tp_size)

    def _norm(
        self, layer: int, name: str, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        weight = self._weight(layer, f"{name}.weight")
        return ops.add_rms_norm(
            self.graph, f"layers.{layer}.{name}", x, residual, weight, self.config.norm_epsilon
        )

    def _weight(self, layer: int, name: str) -> Tensor:
        return self.graph[f"transformer.layers.{layer}.{name}"]

    def _weights(self, layer: int, part: str, first: str, second: str) -> tuple[Tensor, Tensor]:
        return self._weight(layer, f"{part}.{first}"), self._weight(layer, f"{part}.{second}")
