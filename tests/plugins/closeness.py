"""How far an op's result may lie from the fp64 one."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def check_sums(out: Tensor, exact: Tensor, baseline: Tensor, terms: int) -> None:
    """`out` errs at most twice as much as `baseline`, plain torch in `out`'s dtype, plus what the
    order of `terms` fp32 additions and one rounding to `out`'s dtype account for.
    """
    assert out.shape == exact.shape
    if out.numel() == 0:
        return
    assert torch.isfinite(out).all(), f"{int((~torch.isfinite(out)).sum())} values are not finite"
    got, want = out.double().flatten(), exact.flatten()
    largest = want.abs().max().item()
    allowed = 2 * (baseline.double().flatten() - want).abs().max().item()
    allowed += largest * torch.finfo(out.dtype).eps
    allowed += largest * torch.finfo(torch.float32).eps * terms**0.5
    at = int((got - want).abs().argmax())
    error = float((got - want).abs()[at])
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}, at flat index {at}"
    cosine = torch.nn.functional.cosine_similarity(got, want, dim=0).item()
    assert cosine >= 0.99999, f"cosine {cosine}"


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
