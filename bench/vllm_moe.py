"""vLLM's fused-MoE Triton kernel as a baseline, from a copy of its `fused_moe.py`.

pip download --no-deps vllm==0.24.0
unzip -j vllm-*.whl '*/layers/fused_moe/fused_moe.py' -d FOLDER
unzip -j vllm-*.whl '*/fused_moe/configs/E=128*device_name=NVIDIA_H200.json' -d FOLDER
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from m3trt.bench.moe_library import TOP_K, Experts
from torch import Tensor

TAKEN = ("write_zeros_to_output", "fused_moe_kernel", "get_default_config")
HEADER = """from types import SimpleNamespace
from typing import Any
import triton
import triton.language as tl
envs = SimpleNamespace(VLLM_BATCH_INVARIANT=False)
current_platform = SimpleNamespace(is_rocm=lambda: False)
"""


def load_kernel(folder: Path) -> ModuleType:
    """The kernel and its default tile sizes, without the rest of vLLM."""
    source = (folder / "fused_moe.py").read_text()
    lines = source.splitlines()
    parts = [HEADER]
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name in TAKEN:
            start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            parts.append("\n".join(lines[start - 1 : node.end_lineno]))
    path = folder / "kernel_only.py"
    path.write_text("\n\n".join(parts))
    spec = importlib.util.spec_from_file_location("vllm_kernel_only", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tile_sizes(kernel: ModuleType, folder: Path, w: Experts, tokens: int) -> dict[str, int]:
    """vLLM's tuned sizes for this width where it has them, else its defaults."""
    experts, hidden = w.router_weight.shape
    tuned = folder / f"E={experts},N={w.width},device_name=NVIDIA_H200.json"
    if tuned.exists():
        table = {int(k): v for k, v in json.loads(tuned.read_text()).items() if k.isdigit()}
        return dict(table[min(table, key=lambda m: abs(m - tokens))])
    return dict(kernel.get_default_config(tokens, experts, w.width, hidden, TOP_K, None))


def align(chosen: Tensor, experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """What vLLM's moe_align_block_size makes: padded pairs by expert, experts of blocks, count."""
    pairs = chosen.flatten()
    order = pairs.sort(stable=True).indices.tolist()
    counts = torch.bincount(pairs, minlength=experts).tolist()
    ids, blocks, at = [], [], 0
    for expert, count in enumerate(counts):
        padding = -count % block
        ids += order[at : at + count] + [len(pairs)] * padding
        blocks += [expert] * ((count + padding) // block)
        at += count

    def on_gpu(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    return on_gpu(ids), on_gpu(blocks), on_gpu([len(ids)])


def vllm_call(
    kernel: ModuleType, folder: Path, w: Experts, x: Tensor, fc: Tensor, proj: Tensor
) -> Callable[[], Any]:
    """Its two grouped products and torch.matmul for the shared expert's two: the GEMMs alone.

    Routing, alignment, activation and the sum over experts, which vLLM runs as kernels of their
    own, are left out, in its favour. `fc` [E, 2W, H] and `proj` [E, H, W] are whole stacks.
    """
    import triton
    import triton.language as tl

    tokens = len(x)
    config = tile_sizes(kernel, folder, w, tokens)
    config["SPLIT_K"] = 1
    chosen, weights = w.route(x)
    experts, block = len(fc), config["BLOCK_SIZE_M"]
    naive = tokens * TOP_K * 4 <= experts
    if naive:
        ids = None
        blocks = chosen.flatten().to(torch.int32)
        total = torch.tensor([len(blocks) * block], dtype=torch.int32, device="cuda")
        rows = len(blocks) * block
    else:
        ids, blocks, total = align(chosen, experts, block)
        rows = len(ids)
    hidden = torch.empty(tokens, TOP_K, fc.shape[1], dtype=x.dtype, device="cuda")
    activation = torch.randn(tokens * TOP_K, w.width, device="cuda").to(x.dtype)
    shared_activation = torch.randn(tokens, w.width, device="cuda").to(x.dtype)
    out = torch.empty(tokens, TOP_K, x.shape[1], dtype=x.dtype, device="cuda")

    def product(a: Tensor, b: Tensor, c: Tensor, top_k: int, weighted: bool) -> None:
        grid = (triton.cdiv(rows, block) * triton.cdiv(b.shape[1], config["BLOCK_SIZE_N"]),)
        strides = (*a.stride(), b.stride(0), b.stride(2), b.stride(1), c.stride(1), c.stride(2))
        kernel.fused_moe_kernel[grid](
            *(a, b, c, None, None, None, weights, ids, blocks, total),
            *(b.shape[1], b.shape[2], rows, tokens * TOP_K, *strides, *([0] * 7), 0, 0),
            naive_block_assignment=naive,
            MUL_ROUTED_WEIGHT=weighted,
            top_k=top_k,
            compute_type=tl.bfloat16,
            use_fp8_w8a8=False,
            use_int8_w8a8=False,
            use_int8_w8a16=False,
            per_channel_quant=False,
            HAS_BIAS=False,
            **config,
        )

    def call() -> Any:
        product(x, fc, hidden, TOP_K, False)
        product(activation, proj, out, 1, True)
        return x @ w.shared_fc.T, shared_activation @ w.shared_proj.T

    return call
