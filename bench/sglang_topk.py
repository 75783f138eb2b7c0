"""SGLang's CUDA kernel for the decode top-k, compiled from its `minimax_decode_topk.cuh`.

Its launchers need SGLang's and TVM's headers, so only the kernels are taken: the file's text up to
the heading of the launchers, between a few definitions and a launcher of our own.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

FIRST, LAST = "namespace {", "// Launchers"
BEFORE = """#include <cuda_runtime.h>
#include <math_constants.h>
#include <cfloat>
#include <cstdint>
#include <limits>
#define SGL_DEVICE __forceinline__ __device__
static constexpr unsigned int kWarpSyncMask = 0xFFFFFFFFu;
namespace device {
constexpr uint32_t kWarpThreads = 32;
template <bool>
SGL_DEVICE void PDLWaitPrimary() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
namespace warp {
SGL_DEVICE uint32_t reduce_sum(uint32_t x) { return __reduce_add_sync(kWarpSyncMask, x); }
}
}
"""
AFTER = """
}
extern "C" int m3_sglang_topk(float const* score, int const* seq_lens, int* ids, int batch,
                              int heads, int blocks, int block_size, int top_k,
                              cudaStream_t stream) {
  cudaLaunchAttribute pdl{};
  pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  pdl.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(batch, heads);
  config.blockDim = TopKTrait::kCTASize;
  config.stream = stream;
  config.attrs = &pdl;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, minimax_decode_topk_block_kernel<int, true>, score, seq_lens,
                            ids, batch, heads, blocks, block_size, top_k);
}
"""


def source(header: Path) -> str:
    """A translation unit with their kernels and our launcher."""
    text = header.read_text()
    return BEFORE + text[text.index(FIRST) : text.index(LAST)] + AFTER


def load_topk(folder: Path) -> Callable[..., Tensor]:
    """Their Python function on that kernel, compiled for sm_90 when it is not there yet.

    Raises:
        subprocess.CalledProcessError: nvcc failed.
    """
    library = folder / "topk.so"
    if not library.exists():
        unit = folder / "topk.cu"
        unit.write_text(source(folder / "minimax_decode_topk.cuh"))
        nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        flags = ["-std=c++20", "-arch=sm_90", "-shared", "-Xcompiler=-fPIC"]
        subprocess.run([nvcc, *flags, "-o", str(library), str(unit)], check=True)
    launch = ctypes.CDLL(str(library)).m3_sglang_topk

    def topk(score: Tensor, seq_lens: Tensor, block_size: int, topk: int, out: Tensor) -> Tensor:
        heads, batch, blocks = score.shape
        pointers = (ctypes.c_void_p(x.data_ptr()) for x in (score, seq_lens, out))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = launch(*pointers, batch, heads, blocks, block_size, topk, stream)
        assert status == 0, f"CUDA error {status}"
        return out

    return topk
