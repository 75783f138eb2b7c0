"""M3MoE's kernels at the real shapes: time, rate against the floor, vLLM's kernel beside them.

    python -m m3trt.bench.moe [--vllm FOLDER]

One layer: hidden 6144, 128 experts, top 4, random weights and tokens. The rate counts the weights
that a step must read (chosen experts, shared expert, router) while the floor is memory, else the
operations. Each graph replays four steps with tokens of their own, on weights of their own where
the chosen ones would fit into the L2 cache.

`gemms_seconds` is what compares with vLLM's figure: the experts' products alone, routed before, the
shared expert's among them in both; ours with SwiGLU and the zeroing of their counters. Where one
kernel does everything, in the shortest steps, there is no such figure.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from m3trt.bench.moe_library import TOP_K, Experts, MoeLibrary, compile_library
from m3trt.bench.needs import require_gpus
from m3trt.bench.records import append_record
from m3trt.bench.vllm_moe import Shape, compile_all, load_kernel, vllm_call
from torch import Tensor

HIDDEN, EXPERTS, STEPS = 6144, 128, 4
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 800, 1024, 2048, 4096, 8192)
SHAPES = {1: (3072, 4), 4: (768, 1), 8: (384, 1)}  # TP size -> width, parts
READ_BYTES, FLOPS = 4.69e12, 703e12  # a second, measured on one H200
GOALS = {"bytes": 3.5e12, "flops": 480e12}


@dataclass
class Case:
    """Steps of `tokens` tokens on their layers."""

    library: MoeLibrary
    layers: list[Experts]
    xs: list[Tensor]

    def __post_init__(self) -> None:
        self.real = torch.tensor([len(self.xs[0])], dtype=torch.int32, device="cuda")
        self.ys = [torch.empty_like(x) for x in self.xs]
        self.steps = [
            self.library.params(w, x, y, self.real)
            for w, x, y in zip(self.layers, self.xs, self.ys, strict=True)
        ]

    def needs(self) -> tuple[float, int]:
        """Bytes of weights and operations of one step, on average."""
        one = sum(w.bytes_read(w.route(x)[0]) for w, x in zip(self.layers, self.xs, strict=True))
        rows = len(self.xs[0]) * (TOP_K + 1)
        return one / len(self.xs), rows * 6 * self.layers[0].width * HIDDEN

    def calls(self) -> list[Callable[[], Any]]:
        """The whole layer."""
        workspace = self.library.workspace(self.steps[0])
        return [partial(self.library.run, p, workspace) for p in self.steps]

    def gemms(self) -> list[Callable[[], Any]]:
        """The experts' two products with SwiGLU, routed by steps that ran before, and the zeroing
        of their counters; nothing where they are no launches of their own.
        """
        if not self.library.has_products(self.steps[0]):
            return []
        workspaces = [self.library.workspace(p) for p in self.steps]
        pairs = list(zip(self.steps, workspaces, strict=True))
        for p, workspace in pairs:
            self.library.run(p, workspace)
        return [partial(self.library.products, p, workspace) for p, workspace in pairs]


def graph_seconds(calls: list[Callable[[], Any]], replays: int) -> float:
    """Median seconds of one call, from replays of a CUDA graph of all of them."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(2):
        graph.replay()
    events: list[Any] = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(replays + 1)
    ]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return float(median(times)) / 1e3 / len(calls)


def measure(library: MoeLibrary, layers: list[Experts], tokens: int, vllm: Any) -> dict[str, Any]:
    """One record's measurement; `vllm`: (kernel, folder, whole stacks of each layer) or None."""
    chosen = [layers[i % len(layers)] for i in range(STEPS)]
    xs = [torch.randn(tokens, HIDDEN, device="cuda").bfloat16() for _ in range(STEPS)]
    case = Case(library, chosen, xs)
    weight_bytes, operations = case.needs()
    floors = {"bytes": weight_bytes / READ_BYTES, "flops": operations / FLOPS}
    bound = max(floors, key=lambda name: floors[name])
    replays = 10 if tokens * layers[0].width > 2**20 else 30
    seconds = graph_seconds(case.calls(), replays)
    gemms = case.gemms()
    gemms_seconds = graph_seconds(gemms, replays) if gemms else None
    del gemms  # their workspaces
    baselines = {}
    if vllm is not None:
        kernel, folder, stacks = vllm
        pairs = zip(chosen, xs, strict=True)
        theirs = [vllm_call(kernel, folder, w, x, *stacks[id(w)]) for w, x in pairs]
        baselines["vllm fused_moe_kernel, GEMMs alone"] = graph_seconds(theirs, replays)
    return {
        "seconds": seconds,
        "gemms_seconds": gemms_seconds,
        "floor_seconds": floors[bound],
        "bound": bound,
        "rate": (weight_bytes / 1e12 if bound == "bytes" else operations / 1e12) / seconds,
        "rate_unit": "TB/s" if bound == "bytes" else "TFLOP/s",
        "weight_bytes": round(weight_bytes),
        "baselines": baselines,
        "runs": replays,
    }


def make_layers(width: int, parts: int) -> tuple[list[Experts], dict[int, tuple[Tensor, Tensor]]]:
    """Layers whose stacks are parts of whole ones, which vLLM's kernel takes; as many as keep the
    weights of a one-token step out of the L2 cache.
    """
    layers, stacks = [], {}
    for _ in range(1 if width > 1024 else 3):
        w = Experts.random(EXPERTS, HIDDEN, width, 1)
        fc, proj = w.fc[0], w.proj[0]
        w.fc, w.proj = list(fc.chunk(parts)), list(proj.chunk(parts))
        layers.append(w)
        stacks[id(w)] = fc, proj
    return layers, stacks


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table and append a record a case; 1 if one misses its goal."""
    parser = argparse.ArgumentParser(
        prog="python -m m3trt.bench.moe", description="Time M3MoE's kernels at the real shapes."
    )
    parser.add_argument("--vllm", type=Path, help="folder of vLLM's fused_moe.py (vllm_moe.py)")
    parser.add_argument("--tp", type=int, nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    args = parser.parse_args(argv)
    require_gpus(parser)
    library = MoeLibrary(compile_library())
    kernel = None
    if args.vllm:
        kernel = load_kernel(args.vllm)
        widths = [SHAPES[tp][0] for tp in args.tp]
        shapes = [Shape(EXPERTS, HIDDEN, width, m) for width in widths for m in args.tokens]
        compile_all(args.vllm, shapes)
    device = {"device": torch.cuda.get_device_name()}
    versions = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    missed = 0
    for tp in args.tp:
        width, parts = SHAPES[tp]
        layers, stacks = make_layers(width, parts)
        for tokens in args.tokens:
            vllm = (kernel, args.vllm, stacks) if kernel else None
            result = measure(library, layers, tokens, vllm)
            case = {"tp_size": tp, "batch": tokens, "width": width, "dtype": "bfloat16"}
            append_record("moe", device | {"case": case} | result, versions)
            missed += result["rate"] * 1e12 < GOALS[result["bound"]]
            gemms = result["gemms_seconds"]
            ours = f", GEMMs {gemms * 1e6:.1f} us" if gemms else ""
            theirs = "".join(f", vLLM {t * 1e6:.1f} us" for t in result["baselines"].values())
            print(
                f"TP {tp} M {tokens:5} {result['seconds'] * 1e6:9.1f} us"
                f" {result['rate']:7.2f} {result['rate_unit']},"
                f" floor {result['floor_seconds'] * 1e6:.1f} us{ours}{theirs}",
                flush=True,
            )
    print(f"{missed} cases below their goal")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
