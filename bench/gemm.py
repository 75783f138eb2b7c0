"""M3Gemm beside torch.matmul at every projection shape of the model.

python -m m3trt.bench.gemm --model_config tests/data/minimax_m3_config.json

Both run in CUDA graphs over copies of the operands that together exceed the L2 cache. The plugin
runs as an engine of one node. torch writes bf16 logits where the plugin writes fp32 ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
from m3trt.bench.device_time import FLOPS, L2_BYTES, READ_BYTES, graph_of, median_seconds
from m3trt.bench.needs import require_gpus
from m3trt.bench.records import append_record, gpu
from m3trt.build import ops
from m3trt.build.builder import EngineTask, build_engine
from m3trt.build.graph import GraphBuilder
from m3trt.build.library import PLUGIN_LIBRARY, resolve_runtime
from m3trt.convert.configuration import M3Config
from m3trt.convert.hf_config import parse_config
from m3trt.convert.layout import rank_tensors
from m3trt.runtime.tensorrt.device_engine import DeviceEngine
from m3trt.runtime.tensorrt.memory import import_torch
from m3trt.runtime.tensorrt.step_context import Binding
from onnx import TensorProto

ROWS = (1, 8, 32, 128, 1024, 8192)
MAX_ELEMENTS = 2**31 - 1
GOAL = 0.95


def projections(config: M3Config) -> dict[str, tuple[int, int]]:
    """Name -> [N, K] of every weight that M3Gemm multiplies with, one of each shape."""
    first_sparse = config.sparse_layers.index(True)
    layers = {0: "", first_sparse: ".sparse"}
    shapes = {}
    for name, spec in rank_tensors(config).items():
        parts = name.split(".")
        if parts[1] == "layers" and int(parts[2]) not in layers:
            continue
        if name == "lm_head.weight":
            shapes["lm_head"] = spec.shape
        elif name.endswith(("attention.qkv.weight", "attention.dense.weight")) or (
            parts[2:3] == ["0"] and name.endswith(("mlp.fc.weight", "mlp.proj.weight"))
        ):
            shapes[".".join(parts[3:-1]) + layers[int(parts[2])]] = spec.shape
    unique = {shape: name for name, shape in reversed(shapes.items())}
    return {name: (shape[0], shape[1]) for shape, name in unique.items()}


def build_one(name: str, n: int, k: int, library: str, folder: Path) -> Path:
    """An engine of one M3Gemm: `x` [rows, K], `layer.weight` [N, K] -> `y`."""
    graph = GraphBuilder()
    x = graph.input("x", TensorProto.BFLOAT16, ["rows", k])
    weight = graph.input("layer.weight", TensorProto.BFLOAT16, [n, k])
    y = ops.gemm(graph, "y", x, weight, output_dtype="float32" if name == "lm_head" else "same")
    path = folder / f"{name}.onnx"
    onnx.save(graph.model(name, [y]), path)
    task = EngineTask(
        name=name,
        library=library,
        onnx=path,
        engine=path.with_suffix(".engine"),
        ranges={"x": ((1, k), (32, k), (max(ROWS), k))},
        plugin_library=PLUGIN_LIBRARY,
        compute_capabilities=None,
        timing_cache=None,
        verbose=False,
    )
    build_engine(task)
    return task.engine


def measure(engine: DeviceEngine, widened: bool, m: int, n: int, k: int) -> dict[str, Any]:
    """Median seconds of the plugin and of torch, alternating, and the largest difference."""
    torch = import_torch()
    size = 2 * (n * k + m * k) + (4 if widened else 2) * m * n
    copies = min(16, -(-int(4 * L2_BYTES) // size))

    def random(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x, weight = [random(m, k) for _ in range(copies)], [random(n, k) for _ in range(copies)]
    kind = torch.float32 if widened else torch.bfloat16
    y = [torch.empty(m, n, device="cuda", dtype=kind) for _ in range(copies)]
    theirs = [torch.empty(m, n, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]

    def plugin(i: int) -> None:
        engine.launch(
            {"x": Binding((m, k), x[i]), "layer.weight": Binding((n, k), weight[i])}, {"y": y[i]}
        )

    def matmul(i: int) -> None:
        torch.matmul(x[i], weight[i].T, out=theirs[i])

    torch.cuda.synchronize()
    stream, runs = engine.stream, 5 if m > 1024 else 20
    graphs = [
        graph_of([lambda i=i, f=f: f(i) for i in range(copies)], stream)  # type: ignore[misc]
        for f in (plugin, matmul)
    ]
    times: list[list[float]] = [[], []]
    for _ in range(3):
        for graph, seconds in zip(graphs, times, strict=True):
            seconds.append(median_seconds(graph.replay, stream, runs) / copies)
    difference = max(
        float((a.float() - b.float()).abs().max()) for a, b in zip(y, theirs, strict=True)
    )
    floors = {"bytes": size / READ_BYTES, "flops": 2 * m * n * k / FLOPS}
    bound = max(floors, key=lambda name: floors[name])
    ours, torchs = sorted(times[0])[1], sorted(times[1])[1]
    return {
        "seconds": ours,
        "floor_seconds": floors[bound],
        "bound": bound,
        "rate": size / ours if bound == "bytes" else 2 * m * n * k / ours,
        "baselines": {"torch.matmul": torchs},
        "ratio": torchs / ours,
        "largest_difference": difference,
        "runs": 3 * runs,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table and append a record a case; 1 if one misses the goal."""
    parser = argparse.ArgumentParser(
        prog="python -m m3trt.bench.gemm", description="Time M3Gemm beside torch.matmul."
    )
    parser.add_argument("--model_config", type=Path, required=True, help="a released config.json")
    model_config = parser.parse_args(argv).model_config
    require_gpus(parser)
    torch, library, device = import_torch(), resolve_runtime("auto"), gpu()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    missed = 0
    for tp_size in (1, 4):
        config = parse_config(json.loads(model_config.read_text()), {}, tp_size=tp_size)
        for name, (n, k) in projections(config).items():
            with tempfile.TemporaryDirectory() as folder:
                engine = DeviceEngine(
                    build_one(name, n, k, library, Path(folder)), library, PLUGIN_LIBRARY
                )
            for m in ROWS:
                if m * n > MAX_ELEMENTS:
                    continue
                result = measure(engine, name == "lm_head", m, n, k)
                case = {"projection": name, "tp_size": tp_size, "m": m, "n": n, "k": k}
                append_record("gemm", device | {"case": case} | result, versions)
                missed += result["ratio"] < GOAL
                print(
                    f"TP {tp_size} {name:24} M {m:5} N {n:6} K {k:5}"
                    f" {result['seconds'] * 1e6:9.1f} us, torch {result['ratio']:.3f} of that,"
                    f" {result['floor_seconds'] / result['seconds']:.0%} of the floor's rate",
                    flush=True,
                )
            engine.close()
    print(f"{missed} cases below {GOAL} of torch.matmul")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
