"""The mixture-of-experts kernels without TensorRT: compiled from plugins/kernels, called by ctypes.

For the bench and for kernel work on a machine with a GPU, torch and nvcc.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from m3trt.bench import kernel_library as kernels
from m3trt.bench.kernel_library import KERNELS, ROOT
from torch import Tensor

LIBRARY = ROOT / "out" / "moe_kernels.so"
MAX_PARTS = 8
TOP_K, SCALE, ALPHA, LIMIT = 4, 2.0, 1.702, 7.0


class Params(ctypes.Structure):
    """`MoeParams` of smxx_moe.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "y", "real_tokens")),
        ("first_token", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("router_weight", "router_bias")),
        *((name, ctypes.c_void_p * MAX_PARTS) for name in ("fc", "proj")),
        *((name, ctypes.c_void_p) for name in ("shared_fc", "shared_proj")),
        *((name, ctypes.c_int64) for name in ("tokens", "hidden", "width", "shared_width")),
        *((name, ctypes.c_int32) for name in ("experts", "parts", "top_k")),
        *((name, ctypes.c_float) for name in ("scale", "swiglu_alpha", "swiglu_limit")),
        ("type", ctypes.c_int32),
    ]


def compile_library() -> ctypes.CDLL:
    """The kernels that M3MoE chooses on this GPU; see kernel_library.compile_library."""
    bench = ROOT / "bench" / "moe_kernels.cu"
    if kernels.has_wgmma():
        return kernels.compile_library(LIBRARY, [bench, *KERNELS.glob("*moe*.cu")], "-DM3_SM90")
    return kernels.compile_library(LIBRARY, [bench, *KERNELS.glob("smxx_moe*.cu")])


@dataclass
class Experts:
    """Random weights of one layer on the GPU, in `parts` stacks."""

    router_weight: Tensor
    router_bias: Tensor
    fc: list[Tensor]
    proj: list[Tensor]
    shared_fc: Tensor
    shared_proj: Tensor

    @classmethod
    def random(cls, experts: int, hidden: int, width: int, parts: int) -> Experts:
        def normal(*shape: int, scale: float) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(scale)

        each = experts // parts
        fc, proj = 3 * hidden**-0.5, width**-0.5
        return cls(
            torch.randn(experts, hidden, device="cuda") * hidden**-0.5,
            torch.zeros(experts, device="cuda"),
            [normal(each, 2 * width, hidden, scale=fc) for _ in range(parts)],
            [normal(each, hidden, width, scale=proj) for _ in range(parts)],
            normal(2 * width, hidden, scale=fc),
            normal(hidden, width, scale=proj),
        )

    @property
    def width(self) -> int:
        return self.shared_proj.shape[1]

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts and their weights, both [N, 4]."""
        probabilities = torch.sigmoid(x.float() @ self.router_weight.T)
        chosen = (probabilities + self.router_bias).topk(TOP_K, -1).indices
        weights = probabilities.gather(-1, chosen)
        return chosen, SCALE * weights / weights.sum(-1, keepdim=True)

    def bytes_read(self, chosen: Tensor) -> int:
        """What a step with these choices must read of the weights."""
        one = 2 * (self.shared_fc.numel() + self.shared_proj.numel())
        distinct = len(set(chosen.flatten().tolist()))
        return one * (distinct + 1) + 4 * self.router_weight.numel()


class MoeLibrary:
    """The kernels of compile_library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        found = kernels.size_of(library.m3_bench_params_bytes)
        if found != ctypes.sizeof(Params):
            raise RuntimeError(f"MoeParams has {found} bytes, here {ctypes.sizeof(Params)}")

    @staticmethod
    def params(w: Experts, x: Tensor, y: Tensor, real_tokens: Tensor) -> Params:
        p = Params()
        p.x, p.y, p.real_tokens = x.data_ptr(), y.data_ptr(), real_tokens.data_ptr()
        p.router_weight, p.router_bias = w.router_weight.data_ptr(), w.router_bias.data_ptr()
        for i, (fc, proj) in enumerate(zip(w.fc, w.proj, strict=True)):
            p.fc[i], p.proj[i] = fc.data_ptr(), proj.data_ptr()
        p.shared_fc, p.shared_proj = w.shared_fc.data_ptr(), w.shared_proj.data_ptr()
        p.tokens, p.hidden = x.shape
        p.width = p.shared_width = w.width
        p.experts, p.parts, p.top_k = w.router_weight.shape[0], len(w.fc), TOP_K
        p.scale, p.swiglu_alpha, p.swiglu_limit = SCALE, ALPHA, LIMIT
        p.type = 1  # Type::kBfloat16
        return p

    def workspace(self, p: Params) -> Tensor:
        size = kernels.size_of(self._library.m3_bench_moe_workspace, ctypes.byref(p))
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    def run(self, p: Params, workspace: Tensor) -> None:
        """On torch's current stream."""
        self._launch(self._library.m3_bench_moe, p, workspace)

    def has_products(self, p: Params) -> bool:
        """Whether the experts' two products are launches of their own, as products runs them."""
        return bool(self._library.m3_bench_moe_has_products(ctypes.byref(p)))

    def products(self, p: Params, workspace: Tensor) -> None:
        """The experts' two products and SwiGLU again, after run with the same arguments."""
        self._launch(self._library.m3_bench_moe_products, p, workspace)

    @staticmethod
    def _launch(function: Any, p: Params, workspace: Tensor) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = function(ctypes.byref(p), ctypes.c_void_p(workspace.data_ptr()), stream)
        if status != 0:
            raise RuntimeError(f"the launch failed with CUDA error {status}")
