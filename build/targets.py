"""Which GPUs an engine is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from m3trt.build.configuration import BuildConfig
from m3trt.build.library import RTX_COMPUTE_CAPABILITIES, LibraryError, device_compute_capability

FP8_COMPUTE_CAPABILITY = 89
"""The first with e4m3 types; TensorRT-RTX refuses a graph that holds them for earlier targets."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Compute capabilities (10 * major + minor); `at_hand`: the builder is to ask the GPU."""

    compute_capabilities: tuple[int, ...]
    at_hand: bool


def choose_targets(library: str, build: BuildConfig, requested: tuple[int, ...] | None) -> Targets:
    """`requested`, else the GPU of this machine, else all that TensorRT-RTX builds for without one.

    Raises:
        LibraryError: the library cannot build for that here, or a target lacks FP8 that is needed.
    """
    if library != "tensorrt_rtx" and requested is not None:
        where = "the GPU at hand" if library == "tensorrt" else "no GPU"
        raise LibraryError(
            f"compute capabilities {list(requested)} were asked for, but {library} builds for"
            f" {where}: leave them out, or build with tensorrt_rtx"
        )
    if library == "reference":
        return Targets((), False)
    device = device_compute_capability()
    if library == "tensorrt" and device is None:
        raise LibraryError("tensorrt builds only where there is a GPU: use --runtime tensorrt_rtx")
    needs_fp8 = "fp8" in (build.kv_cache_dtype, build.index_cache_dtype)
    least = FP8_COMPUTE_CAPABILITY if needs_fp8 else 0
    if requested is not None:
        chosen = Targets(requested, False)
    elif device is not None:
        chosen = Targets((device,), True)
    else:
        chosen = Targets(tuple(x for x in RTX_COMPUTE_CAPABILITIES if x >= least), False)
    if too_old := [x for x in chosen.compute_capabilities if x < least]:
        raise LibraryError(
            f"compute capabilities {too_old} have no FP8, which the caches need: target {least} or"
            " later, or leave the cache dtypes at auto"
        )
    return chosen
