"""vLLM's fused-MoE Triton kernel as a baseline, from a copy of its `fused_moe.py`.

pip download --no-deps vllm==0.24.0
unzip -j vllm-*.whl '*/layers/fused_moe/fused_moe.py' -d FOLDER
unzip -j vllm-*.whl '*/fused_moe/configs/E=128*device_name=NVIDIA_H200.json' -d FOLDER
"""

from __future__ import annotations

import ast
import importlib.util
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
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
    text = "\n\n".join(parts)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    spec = importlib.util.spec_from_file_location("vllm_kernel_only", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Shape:
    """Of one step."""

    experts: int
    hidden: int
    width: int
    tokens: int

    @property
    def naive(self) -> bool:
        """So few tokens that vLLM gives every pair of token and expert a block of its own."""
        return self.tokens * TOP_K * 4 <= self.experts

    def tile_sizes(self, kernel: ModuleType, folder: Path) -> dict[str, int]:
        """vLLM's tuned sizes for this width where it has them, else its defaults."""
        tuned = folder / f"E={self.experts},N={self.width},device_name=NVIDIA_H200.json"
        if tuned.exists():
            table = {int(k): v for k, v in json.loads(tuned.read_text()).items() if k.isdigit()}
            config = dict(table[min(table, key=lambda m: abs(m - self.tokens))])
        else:
            config = dict(
                kernel.get_default_config(
                    self.tokens, self.experts, self.width, self.hidden, TOP_K, None
                )
            )
        return config | {"SPLIT_K": 1}

    def product(
        self, is_fc: bool, config: dict[str, int], rows: int, data: Sequence[Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Arguments of one product; data: a, b, c, weights, ids, blocks and count, or dtypes."""
        import triton.language as tl

        depth = self.hidden if is_fc else self.width
        columns = 2 * self.width if is_fc else self.hidden
        a, b, c, weights, ids, blocks, count = data
        arguments = [
            *(a, b, c, None, None, None, weights, ids, blocks, count),
            *(columns, depth, rows, self.tokens * TOP_K),
            *(depth, 1, columns * depth, 1, depth, columns, 1, *([0] * 7), 0, 0),
        ]
        constants = config | {
            "naive_block_assignment": self.naive,
            "MUL_ROUTED_WEIGHT": not is_fc,
            "top_k": TOP_K if is_fc else 1,
            "compute_type": tl.bfloat16,
            "use_fp8_w8a8": False,
            "use_int8_w8a8": False,
            "use_int8_w8a16": False,
            "per_channel_quant": False,
            "HAS_BIAS": False,
        }
        return arguments, constants


def compile_products(folder: Path, shape: Shape) -> None:
    """Puts both products into Triton's cache."""
    kernel = load_kernel(folder)
    config = shape.tile_sizes(kernel, folder)
    bf16, i32 = torch.bfloat16, torch.int32
    data = [bf16, bf16, bf16, torch.float32, None if shape.naive else i32, i32, i32]
    for is_fc in (True, False):
        arguments, constants = shape.product(is_fc, config, 16 * config["BLOCK_SIZE_M"], data)
        kernel.fused_moe_kernel.warmup(*arguments, grid=(1,), **constants)


def compile_all(folder: Path, shapes: Sequence[Shape]) -> None:
    """compile_products in several processes: Triton takes about a second for each."""
    load_kernel(folder)
    context = multiprocessing.get_context("spawn")
    workers = min(len(shapes), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        list(pool.map(partial(compile_products, folder), shapes))


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

    tokens = len(x)
    shape = Shape(len(fc), x.shape[1], w.width, tokens)
    config = shape.tile_sizes(kernel, folder)
    chosen, weights = w.route(x)
    block = config["BLOCK_SIZE_M"]
    if shape.naive:
        ids = None
        blocks = chosen.flatten().to(torch.int32)
        count = torch.tensor([len(blocks) * block], dtype=torch.int32, device="cuda")
        rows = len(blocks) * block
    else:
        ids, blocks, count = align(chosen, shape.experts, block)
        rows = len(ids)
    hidden = torch.empty(tokens, TOP_K, fc.shape[1], dtype=x.dtype, device="cuda")
    activation = torch.randn(tokens * TOP_K, w.width, device="cuda").to(x.dtype)
    shared_activation = torch.randn(tokens, w.width, device="cuda").to(x.dtype)
    out = torch.empty(tokens, TOP_K, x.shape[1], dtype=x.dtype, device="cuda")

    def product(a: Tensor, b: Tensor, c: Tensor, is_fc: bool) -> None:
        data = a, b, c, weights, ids, blocks, count
        arguments, constants = shape.product(is_fc, config, rows, data)
        grid = (triton.cdiv(rows, block) * triton.cdiv(b.shape[1], config["BLOCK_SIZE_N"]),)
        kernel.fused_moe_kernel[grid](*arguments, **constants)

    def call() -> Any:
        product(x, fc, hidden, True)
        product(activation, proj, out, False)
        return x @ w.shared_fc.T, shared_activation @ w.shared_proj.T

    return call
