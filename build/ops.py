"""Emitters of the ops of domain `m3`: each takes and returns tensors, `name` is the node's name.

The attributes of an `m3` node are its plugin's fields: all of them mandatory, none beyond.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from m3trt.build.graph import PLUGIN_DOMAIN, Dim, GraphBuilder, Tensor
from m3trt.build.tensors import updated
from onnx import TensorProto

FLOAT = TensorProto.FLOAT
INT32 = TensorProto.INT32


@dataclass(frozen=True, slots=True)
class Batch:
    """The step's tensors that tell which tokens belong to which request and page."""

    position_ids: Tensor
    cu_query_lens: Tensor
    sequence_length: Tensor
    kv_cache_block_offsets: Tensor
    decode_rows: Tensor

    @property
    def lengths(self) -> list[Tensor]:
        return [self.cu_query_lens, self.sequence_length, self.kv_cache_block_offsets]


@dataclass(frozen=True, slots=True)
class Cache:
    """A paged cache; `scale` is fp32 [1] where the cache is e4m3."""

    pages: Tensor
    scale: Tensor | None

    @property
    def scales(self) -> list[Tensor]:
        return [] if self.scale is None else [self.scale]

    def after_update(self) -> Cache:
        """The same memory after this step's tokens were written."""
        return Cache(
            Tensor(updated(self.pages.name), self.pages.dtype, self.pages.shape), self.scale
        )


def embedding(
    graph: GraphBuilder, name: str, ids: Tensor, words: Tensor, prompt_table: Tensor
) -> Tensor:
    """Rows of `words`; ids from its length on pick rows of `prompt_table` instead."""
    vocab_size, hidden = words.shape
    out = Tensor(name, words.dtype, (ids.shape[0], hidden))
    graph.nodes(
        "M3Embedding",
        name,
        [ids, words, prompt_table],
        [out],
        PLUGIN_DOMAIN,
        vocab_size=vocab_size,
    )
    return out


def add_rms_norm(
    graph: GraphBuilder,
    name: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    epsilon: float,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The RMS norm of x + residual, and that sum: both in x's dtype, the norm of the rounded sum in
    fp32 and rounded once. Without a residual the sum is x; `rows` picks rows for the norm, and then
    nothing may read the sum.
    """
    shape = x.shape if rows is None else (rows.shape[0], *x.shape[1:])
    normed, total = Tensor(name, x.dtype, shape), x
    inputs, outputs = [x, weight], [normed]
    if residual is not None:
        inputs.insert(1, residual)
    if rows is not None:
        inputs.append(rows)
    elif residual is not None:
        total = Tensor(f"{name}.sum", x.dtype, x.shape)
        outputs.append(total)
    graph.nodes(
        "M3AddRmsNorm",
        name,
        inputs,
        outputs,
        PLUGIN_DOMAIN,
        has_residual=int(residual is not None),
        has_rows=int(rows is not None),
        epsilon=epsilon,
    )
    return normed, total


def gemm(
    graph: GraphBuilder,
    name: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    epilogue: Literal["none", "gelu_erf"] = "none",
    output_dtype: Literal["same", "float32"] = "same",
) -> Tensor:
    """x [..., K] weight[N, K]^T (+ bias [N]), accumulated in fp32 and rounded once."""
    out = Tensor(
        name, x.dtype if output_dtype == "same" else FLOAT, (*x.shape[:-1], weight.shape[0])
    )
    graph.nodes(
        "M3Gemm",
        name,
        [x, weight] if bias is None else [x, weight, bias],
        [out],
        PLUGIN_DOMAIN,
        has_bias=int(bias is not None),
        epilogue=epilogue,
        output_dtype=output_dtype,
    )
    return out


def cache_update(
    graph: GraphBuilder,
    name: str,
    qkv: Tensor,
    batch: Batch,
    inv_freq: Tensor,
    kv: Cache,
    norms: tuple[Tensor, Tensor],
    index: Cache | None,
    index_norms: tuple[Tensor, Tensor] | None,
    num_heads: int,
    rotary_dim: int,
    epsilon: float,
) -> tuple[Tensor, Tensor | None]:
    """Norm and rotate the heads of `qkv`, write K, V (and index K) into their pages.

    A sparse layer passes `index` and `index_norms`. Returns q [tokens, num_heads, head_size] and
    index q [tokens, num_index_heads, index_head_size]; the written caches are `after_update()`.
    """
    tokens, num_kv_heads, head_size = qkv.shape[0], *kv.pages.shape[3:]
    q = Tensor(f"{name}.q", qkv.dtype, (tokens, num_heads, head_size))
    inputs = [qkv, batch.position_ids, *batch.lengths, kv.pages, inv_freq, *norms]
    outputs = [q, kv.after_update().pages]
    index_q = None
    if index is not None and index_norms is not None:
        index_q = Tensor(f"{name}.index_q", qkv.dtype, (tokens, num_kv_heads, index.pages.shape[2]))
        inputs += [index.pages, *index_norms, *kv.scales, *index.scales]
        outputs += [index_q, index.after_update().pages]
    else:
        inputs += kv.scales
    graph.nodes(
        "M3CacheUpdate",
        name,
        inputs,
        outputs,
        PLUGIN_DOMAIN,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_index_heads=0 if index_q is None else num_kv_heads,
        head_size=head_size,
        index_head_size=head_size if index is None else index.pages.shape[2],
        rotary_dim=rotary_dim,
        epsilon=epsilon,
    )
    return q, index_q


def block_select(
    graph: GraphBuilder,
    name: str,
    index_q: Tensor,
    index: Cache,
    batch: Batch,
    block_size: int,
    top_k: int,
    init_blocks: int,
    local_blocks: int,
) -> Tensor:
    """Logical block ids int32 [index heads, tokens, top_k]: ascending, own block last, -1 after."""
    tokens, heads, _ = index_q.shape
    out = Tensor(name, INT32, (heads, tokens, top_k))
    graph.nodes(
        "M3BlockSelect",
        name,
        [index_q, index.pages, *batch.lengths, batch.decode_rows, *index.scales],
        [out],
        PLUGIN_DOMAIN,
        block_size=block_size,
        top_k=top_k,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
    )
    return out


def attention(
    graph: GraphBuilder,
    name: str,
    q: Tensor,
    kv: Cache,
    block_ids: Tensor | None,
    batch: Batch,
    softmax_scale: float,
) -> Tensor:
    """Causal attention over the pages, only the blocks `block_ids` where given: [tokens, width]."""
    out = Tensor(name, q.dtype, (q.shape[0], _product(q.shape[1:])))
    graph.nodes(
        "M3PagedAttention" if block_ids is None else "M3SparseAttention",
        name,
        [
            q,
            kv.pages,
            *([] if block_ids is None else [block_ids]),
            *batch.lengths,
            batch.decode_rows,
            *kv.scales,
        ],
        [out],
        PLUGIN_DOMAIN,
        block_size=kv.pages.shape[2],
        softmax_scale=softmax_scale,
    )
    return out


def varlen_attention(
    graph: GraphBuilder, name: str, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Attention in both directions inside each segment of `cu_seqlens`: [rows, width]."""
    head_size = q.shape[2]
    assert isinstance(head_size, int)
    out = Tensor(name, q.dtype, (q.shape[0], _product(q.shape[1:])))
    graph.nodes(
        "M3VarlenAttention",
        name,
        [q, k, v, cu_seqlens],
        [out],
        PLUGIN_DOMAIN,
        softmax_scale=head_size**-0.5,
    )
    return out


def moe(
    graph: GraphBuilder,
    name: str,
    x: Tensor,
    cu_query_lens: Tensor,
    router: tuple[Tensor, Tensor],
    fc: Sequence[Tensor],
    proj: Sequence[Tensor],
    shared: tuple[Tensor, Tensor],
    top_k: int,
    routed_scaling_factor: float,
    swiglu_alpha: float,
    swiglu_limit: float,
) -> Tensor:
    """Routed experts (stacks in equal parts `fc`, `proj`) plus the shared expert: x's shape."""
    out = Tensor(name, x.dtype, x.shape)
    graph.nodes(
        "M3MoE",
        name,
        [x, cu_query_lens, *router, *fc, *proj, *shared],
        [out],
        PLUGIN_DOMAIN,
        expert_parts=len(fc),
        top_k=top_k,
        routed_scaling_factor=routed_scaling_factor,
        swiglu_alpha=swiglu_alpha,
        swiglu_limit=swiglu_limit,
    )
    return out


def all_reduce(graph: GraphBuilder, name: str, x: Tensor, group_size: int) -> Tensor:
    """The sum over the ranks; x itself on one rank."""
    if group_size == 1:
        return x
    out = Tensor(name, x.dtype, x.shape)
    graph.nodes("M3AllReduce", name, [x], [out], PLUGIN_DOMAIN, group_size=group_size)
    return out


def all_gather(graph: GraphBuilder, name: str, x: Tensor, group_size: int) -> Tensor:
    """The ranks' x side by side along the last axis; x itself on one rank."""
    if group_size == 1:
        return x
    out = Tensor(name, x.dtype, (*x.shape[:-1], _product([x.shape[-1], group_size])))
    graph.nodes("M3AllGather", name, [x], [out], PLUGIN_DOMAIN, group_size=group_size)
    return out


def _product(dims: Sequence[Dim]) -> int:
    """The product of dimensions that are all known numbers."""
    total = 1
    for dim in dims:
        assert isinstance(dim, int)
        total *= dim
    return total
