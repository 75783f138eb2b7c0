"""vLLM's and SGLang's kernels for MSA and FlashAttention-3 as baselines, from their PyPI wheels.

pip download --no-deps --only-binary :all: vllm==0.24.0 sglang==0.5.16
unzip vllm-*.whl 'vllm/models/minimax_m3/common/ops/*' -d FOLDER
unzip vllm-*.whl vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so -d FOLDER
unzip sglang-*.whl 'sglang/kernels/ops/attention/minimax_sparse/*' -d FOLDER
unzip sglang-*.whl sglang/jit_kernel/csrc/minimax/minimax_decode_topk.cuh -d FOLDER

Nothing else of the wheels is needed: the few helpers that those files import are replaced here.
Both peers read our caches in place. Their autotuners choose anew for every case.
"""

from __future__ import annotations

import importlib
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from m3trt.bench.kernel_library import BLOCK, HEAD
from m3trt.bench.msa_bench import elapsed
from m3trt.bench.msa_steps import SCALE, TOP_K, Step
from m3trt.bench.sglang_topk import load_topk
from torch import Tensor

Call = Callable[[], Tensor]
Attend = Callable[[Tensor], Tensor]
VLLM, SGLANG, FA3 = "vLLM 0.24.0", "SGLang 0.5.16", "FlashAttention-3 (vLLM 0.24.0)"


def _package(name: str, folder: Path) -> None:
    """A package of that name whose modules lie in `folder`, without running its __init__."""
    module = ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules[name] = module


def _module(name: str, **values: Any) -> None:
    module = ModuleType(name)
    vars(module).update(values)
    sys.modules[name] = module


def _autotuners(modules: list[ModuleType]) -> list[Any]:
    """The autotuners of the modules' kernels, with a measurement of milliseconds."""
    from triton.runtime.autotuner import Autotuner

    found = []
    for module in modules:
        for value in list(vars(module).values()):
            while value is not None and not isinstance(value, Autotuner):
                value = getattr(value, "fn", None)
            if value is not None and value not in found:
                value._do_bench = _times
                _fit_block(value)
                found.append(value)
    return found


def _times(run: Callable[[], Any], quantiles: Any) -> list[float]:
    """Three times the same figure, as an autotuner expects: short calls with a cold L2 cache."""
    run()
    once = elapsed(run)
    if once > 1e-3:
        return [once] * 3
    flushed = torch.empty(96 << 20, dtype=torch.int8, device="cuda")
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for _ in range(3):
            flushed.zero_()
            run()
    graph.replay()
    return [elapsed(graph.replay)] * 3


def _fit_block(tuner: Any) -> None:
    """Leave out tiles smaller than a block, which SGLang's score kernels do not compile with."""
    if "score" in tuner.base_fn.__name__:
        tuner.configs = [
            config
            for config in tuner.configs
            if min(config.kwargs.get(name, BLOCK) for name in ("BLOCK_SIZE_N", "BLOCK_SIZE_K"))
            >= BLOCK
        ]


class Vllm:
    """vLLM's Triton kernels; cache layouts and page size are ours."""

    name = VLLM

    def __init__(self, folder: Path) -> None:
        import triton
        import triton.language as tl

        platform = SimpleNamespace(is_rocm=lambda: False, is_arch_support_pdl=lambda: True)
        for name in ("vllm", "vllm.utils"):
            _module(name)
        _module("vllm.platforms", current_platform=platform)
        _module("vllm.triton_utils", triton=triton, tl=tl)
        _module("vllm.utils.math_utils", round_up=lambda x, y: -(-x // y) * y)
        _package("m3_vllm_ops", folder / "vllm" / "models" / "minimax_m3" / "common" / "ops")
        self.index = importlib.import_module("m3_vllm_ops.index_topk")
        self.attention = importlib.import_module("m3_vllm_ops.sparse_attn")
        self.tuners = _autotuners([self.index, self.attention])

    def retune(self) -> None:
        for tuner in self.tuners:
            tuner.cache.clear()

    def select(self, s: Step) -> Call:
        """Block ids [G, N, 16]."""
        batch, heads = s.batch, s.index_q.shape[1]
        out = torch.empty(heads, len(s.index_q), TOP_K, dtype=torch.int32, device=s.q.device)
        if s.decoding:

            def decode() -> Tensor:
                return self.index.minimax_m3_index_decode(  # type: ignore[no-any-return]
                    *(s.index_q, s.index_cache, batch.table, batch.sequence_length, s.longest),
                    *(TOP_K, 0, 1, heads, batch.q_len, batch.q_len, out),
                )

            return decode
        prefix, most = s.prefix, max(s.counts)

        def prefill() -> Tensor:
            score = self.index.minimax_m3_index_score(
                *(s.index_q, s.index_cache, batch.table, batch.cu_query_lens),
                *(batch.sequence_length, prefix, most, s.longest, heads),
            )
            return self.index.minimax_m3_index_topk(  # type: ignore[no-any-return]
                score, batch.cu_query_lens, prefix, most, TOP_K, 0, 1, out
            )

        return prefill

    def attend(self, s: Step) -> Attend:
        """Attention [N, Hq, D] over given blocks."""
        out, batch = torch.full_like(s.q, torch.nan), s.batch
        if s.decoding:

            def decode(ids: Tensor) -> Tensor:
                self.attention.minimax_m3_sparse_attn_decode(
                    *(s.q, s.kv_cache, ids, batch.table, batch.sequence_length),
                    *(s.kv_heads, SCALE, out, batch.q_len),
                )
                return out

            return decode
        prefix, most = s.prefix, max(s.counts)

        def prefill(ids: Tensor) -> Tensor:
            self.attention.minimax_m3_sparse_attn(
                *(s.q, s.kv_cache, ids, batch.table, batch.cu_query_lens, batch.sequence_length),
                *(prefix, most, s.kv_heads, SCALE, out),
            )
            return out

        return prefill


class Sglang:
    """SGLang's Triton kernels and, up to 4096 blocks, its CUDA kernel for the decode top-k.

    It addresses tokens, not pages: our caches are its pools of token slots, those of V being those
    of K behind an offset. Rows of several query tokens take its prefill kernels, as in its backend.
    """

    name = SGLANG

    def __init__(self, folder: Path) -> None:
        radix = SimpleNamespace(get=lambda: True)
        for name in ("sglang", "sglang.srt", "sglang.jit_kernel"):
            _module(name)
        _module(
            "sglang.srt.environ",
            envs=SimpleNamespace(SGLANG_OPT_USE_MINIMAX_DECODE_TOPK_RADIX=radix),
        )
        topk = load_topk(folder / "sglang" / "jit_kernel" / "csrc" / "minimax")
        _module("sglang.jit_kernel.minimax_decode_topk", minimax_decode_topk=topk)
        ops = folder / "sglang" / "kernels" / "ops" / "attention" / "minimax_sparse"
        _package("m3_sglang_ops", ops)
        modules = [
            importlib.import_module(f"m3_sglang_ops.{part}.{name}")
            for part in ("decode", "prefill")
            for name in ("flash_with_topk_idx", "topk_sparse")
        ]
        self.decode_index, self.decode_sparse, self.prefill_index, self.prefill_sparse = modules
        self.tuners = _autotuners(modules)

    def retune(self) -> None:
        for tuner in self.tuners:
            tuner.cache.clear()

    @staticmethod
    def slots(table: Tensor, per_page: int) -> Tensor:
        """Token slots [requests, pages * 128] of pools with `per_page` slots a page."""
        inside = torch.arange(BLOCK, dtype=torch.int32, device=table.device)
        return (table.clamp(min=0)[:, :, None] * per_page + inside).flatten(1)

    def _requests(self, s: Step) -> dict[str, Any]:
        rows = torch.arange(len(s.batch.table), device=s.q.device)
        return {"slot_ids": rows, "seq_lens": s.batch.sequence_length}

    def _chunks(self, s: Step) -> dict[str, Any]:
        return self._requests(s) | {
            "cu_seqlens": s.batch.cu_query_lens,
            "prefix_lens": s.prefix,
            "max_seqlen_q": max(s.counts),
            "cu_seqblocks_q": s.batch.cu_query_lens,
            "max_seqblock_q": max(s.counts),
        }

    def select(self, s: Step) -> Call:
        """Block ids [G, N, 16]."""
        common = {
            "q": s.index_q,
            "sink": None,
            "k_cache": s.index_cache.view(-1, 1, HEAD),
            "v_cache": None,
            "req_to_token": self.slots(s.batch.table, BLOCK),
            "topk": TOP_K,
            "init_blocks": 0,
            "local_blocks": 1,
            "disable_index_value": True,
        }
        if s.decoding and s.batch.q_len == 1:
            more = self._requests(s) | {"max_seqlen": s.longest, "block_size": BLOCK}
            run = self.decode_index.flash_decode_with_topk_idx
        else:
            more = self._chunks(s) | {"max_seqlen_k": s.longest, "all_seqblock_q": len(s.index_q)}
            more |= {"block_size_q": 1, "block_size_k": BLOCK}
            run = self.prefill_index.flash_prefill_with_topk_index
        return lambda: run(**common, **more)[1]

    def attend(self, s: Step) -> Attend:
        """Attention [N, Hq, D] over given blocks."""
        pages, _, _, heads, _ = s.kv_cache.shape
        slots, stride = pages * 2 * BLOCK, (heads * HEAD, HEAD, 1)
        k = s.kv_cache.view(slots, heads, HEAD)
        v = k.as_strided((slots - BLOCK, heads, HEAD), stride, BLOCK * heads * HEAD)
        common = {
            "q": s.q,
            "sink": None,
            "k_cache": k,
            "v_cache": v,
            "req_to_token": self.slots(s.batch.table, 2 * BLOCK),
        }
        if s.decoding and s.batch.q_len == 1:
            more = self._requests(s) | {"block_size": BLOCK}
            run = self.decode_sparse.flash_decode_with_gqa_share_sparse
        else:
            more = self._chunks(s) | {"block_size_q": 1, "block_size_k": BLOCK}
            run = self.prefill_sparse.flash_prefill_with_gqa_share_sparse
        return lambda ids: run(topk_idx=ids, **common, **more)


class FlashAttention3:
    """Dense causal attention on the paged cache, as vLLM calls it for its dense layers."""

    name = FA3

    def __init__(self, folder: Path) -> None:
        library = folder / "vllm" / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"
        packed = library.with_suffix(".so.xz")
        if not library.exists() and packed.exists():
            library.write_bytes(lzma.decompress(packed.read_bytes()))
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]

    def dense(self, s: Step) -> Call:
        """Attention over all earlier tokens, packed [N, Hq, D]."""
        batch = s.batch
        k, v = s.kv_cache[:, 0], s.kv_cache[:, 1]
        scales = None
        if k.dtype == torch.float8_e4m3fn:
            scales = torch.ones(len(batch.table), s.kv_heads, device=k.device)
        q = s.q.to(k.dtype)
        out = torch.empty_like(s.q)
        cu_lens, used, table = batch.cu_query_lens, batch.sequence_length, batch.table

        def call() -> Tensor:
            return torch.ops._vllm_fa3_C.fwd(  # type: ignore[no-any-return]
                *(q, k, v, None, None, None, out, cu_lens, None, None, None, used),
                *(max(s.counts), s.longest, table, None, None, None, None, None),
                *(scales, scales, scales, SCALE, True, -1, -1, 0.0, True, None, 0, None, 0),
                *(None, 1, 0, None),
            )[0]

        return call


def load_peers(folder: Path) -> list[Vllm | Sglang]:
    """Both, from the folder that the wheels' files were unzipped to.

    Raises:
        FileNotFoundError: something is not there.
    """
    for name in ("vllm/models/minimax_m3", "vllm/vllm_flash_attn", "sglang/kernels"):
        if not (folder / name).is_dir():
            raise FileNotFoundError(f"{folder / name}: see the docstring of m3trt.bench.peers")
    return [Vllm(folder), Sglang(folder)]
