"""Steps of a slice of the released model, or of one tensor-parallel rank of all of it.

python -m m3trt.bench.slice --model_config tests/data/minimax_m3_config.json slice
python -m m3trt.bench.slice --model_config tests/data/minimax_m3_config.json rank

`slice`: one dense and five sparse layers at TP 1. `rank`: the 60 layers of one TP 8 rank, without
its collectives. Weights and caches are random and made on the GPU. Requests share pages where the
GPU's memory does not hold all of them; each still reads as many.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from m3trt.bench import random_engine
from m3trt.bench.device_time import breakdown, median_seconds
from m3trt.bench.floors import floor_fields, step_floors
from m3trt.bench.needs import require_gpus
from m3trt.bench.records import append_record, gpu
from m3trt.bench.routing import MOST_TOKENS, emulated_experts, expected_experts
from m3trt.build import tensors
from m3trt.build.configuration import BuildConfig
from m3trt.build.library import describe, resolve_runtime
from m3trt.convert.configuration import M3Config
from m3trt.convert.hf_config import parse_config
from m3trt.convert.layout import rank_tensors
from m3trt.runtime.bindings import step_arrays
from m3trt.runtime.step import StepInputs
from m3trt.runtime.tensorrt.device_engine import DeviceEngine
from m3trt.runtime.tensorrt.memory import import_torch

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
GIB = 1 << 30
HEADROOM = 6 * GIB
"""GPU memory left free for cuBLAS, graphs and staging buffers."""


@dataclass(frozen=True, slots=True)
class Case:
    """`requests` with `context` tokens each in the caches; `new` tokens each are added."""

    requests: int
    context: int
    new: int = 1
    generate: int = 0
    """Decode steps in a row, timed by the host's clock; 0: one step, over and over."""

    @property
    def name(self) -> str:
        return "decode" if self.new == 1 else "prefill"


CASES = {
    "slice": [
        *(Case(requests, 1024) for requests in (1, 8, 32)),
        Case(1, 0, new=8192),
        Case(128, 8192),
        *(Case(requests, context) for context in (61440, 131072) for requests in (1, 8, 32)),
    ],
    "rank": [
        Case(1, 61440, generate=800),  # first: a profiler that ran slows every later launch
        *(Case(requests, 61440) for requests in (1, 8, 32)),
        Case(1, 61440, new=16384),
    ],
}


def model(kind: str, path: Path) -> M3Config:
    """The config to measure: without vision, which has an engine of its own."""
    data = json.loads(path.read_text())
    config = replace(parse_config(data, {}, tp_size=8 if kind == "rank" else 1), vision=None)
    if kind == "rank":
        return config
    layers = (False, True, True, True, True, True)
    return replace(config, num_hidden_layers=6, sparse_layers=layers, moe_layers=layers)


def step_inputs(case: Case, config: M3Config, pages: int, width: int) -> tuple[StepInputs, bool]:
    """A step of random tokens, and whether its requests share pages."""
    rng = np.random.default_rng(0)
    length, count = case.context + case.new, case.requests * case.new
    each = -(-length // config.tokens_per_block)
    order = rng.permutation(pages).astype(np.int32)
    table = np.full((case.requests, width), -1, np.int32)
    for row in range(case.requests):
        table[row, :each] = np.take(order, np.arange(each) + row * each, mode="wrap")
    decode = case.new == 1
    last = np.arange(1, case.requests + 1) * case.new - 1
    inputs = StepInputs(
        input_ids=rng.integers(0, config.vocab_size, count).astype(np.int32),
        position_ids=np.tile(np.arange(case.context, length, dtype=np.int32), case.requests),
        cu_query_lens=np.arange(case.requests + 1, dtype=np.int32) * np.int32(case.new),
        sequence_length=np.full(case.requests, length, np.int32),
        kv_cache_block_offsets=table,
        decode_shape=(case.requests if decode else 0, 1),
        logit_rows=last.astype(np.int32),
        prompt_embedding_table=np.zeros((1, config.hidden_size), DTYPES[config.dtype]),
    )
    return inputs, case.requests * each > pages


def measure(engine: DeviceEngine, inputs: StepInputs, case: Case, limit: float) -> dict[str, Any]:
    """Times of one step; stops repeating it when `limit` seconds have gone."""
    torch, start = import_torch(), time.monotonic()
    feeds = step_arrays(inputs)
    captured = case.new == 1
    run: Callable[[], Any] = lambda: engine.run(feeds, tensors.LOGITS)  # noqa: E731
    if captured:
        run = lambda: engine.run_captured(feeds, tensors.LOGITS)  # noqa: E731
    finite = bool(np.isfinite(run()).all())
    once = time.monotonic()
    run()
    host = [time.monotonic() - once]
    while len(host) < 10 and time.monotonic() - start < limit / 3:
        once = time.monotonic()
        run()
        host.append(time.monotonic() - once)
    host_seconds = sorted(host)[len(host) // 2]
    runs = max(1, min(20, int(limit / 3 / host_seconds)))
    if captured:
        graph = engine.captured(feeds).graph
        seconds = median_seconds(graph.replay, engine.stream, runs)
        ops = breakdown(graph.replay)
    else:
        runs = min(runs, 5)
        seconds = median_seconds(run, engine.stream, runs)
        ops = breakdown(run)
    torch.cuda.synchronize()
    return {
        "seconds": seconds,
        "host_seconds": host_seconds,
        "captured": captured,
        "finite": finite,
        "ops": ops,
        "runs": runs,
    }


def generate(engine: DeviceEngine, inputs: StepInputs, case: Case, limit: float) -> dict[str, Any]:
    """Greedy decode steps one after another, as many as `limit` seconds allow, by the host's clock:
    staging, replay, logits to the host, argmax there."""

    def advance(step: int, ids: Any) -> StepInputs:
        return replace(
            inputs,
            input_ids=ids,
            position_ids=inputs.position_ids + np.int32(step),
            sequence_length=inputs.sequence_length + np.int32(step),
        )

    engine.run_captured(step_arrays(inputs), tensors.LOGITS)  # captures the graph
    ids, start, done = inputs.input_ids, time.monotonic(), 0
    while done < case.generate and time.monotonic() - start < limit:
        feeds = step_arrays(advance(done, ids))
        logits = engine.run_captured(feeds, tensors.LOGITS)
        ids = logits.argmax(axis=1).astype(np.int32)
        done += 1
    total = time.monotonic() - start
    return {"seconds": total / done, "total_seconds": total, "tokens": done, "runs": 1}


def run_cases(kind: str, config: M3Config, case_limit: float, limit: float) -> int:
    """Build, load and measure; a record a case. Returns how many cases failed."""
    torch, library, device = import_torch(), resolve_runtime("auto"), gpu()
    versions = {library: describe(library).version, "torch": torch.__version__}
    cases, start = CASES[kind], time.monotonic()
    longest = max(case.context + case.new + case.generate for case in cases)
    free = torch.cuda.mem_get_info()[0]
    limits = BuildConfig.for_model(
        config,
        max_batch_size=max(case.requests for case in cases),
        max_num_tokens=max(case.requests * case.new for case in cases),
        max_seq_len=longest + config.tokens_per_block,
    )
    common = {
        "model": kind,
        "layers": config.num_hidden_layers,
        "tp_size": config.tp_size,
        "dtype": config.dtype,
    }

    def record(case: dict[str, Any], result: dict[str, Any]) -> None:
        append_record("slice", device | {"case": common | case} | result, versions)
        shown = {k: v for k, v in result.items() if k not in ("ops", "floors", "work")}
        print(json.dumps(case | shown), flush=True)

    with tempfile.TemporaryDirectory() as folder:
        report = random_engine.build(config, limits, library, Path(folder))
        loading = time.monotonic()
        pages = page_count(config, limits, cases, free)
        engine = random_engine.load(Path(folder) / "rank0.engine", config, library, pages)
    record(
        {"step": "build"},
        {
            "seconds": report.seconds,
            "peak_rss_gb": report.peak_bytes / 1e9,
            "engine_mb": report.engine_bytes / 1e6,
        },
    )
    record(
        {"step": "load"},
        {
            "seconds": time.monotonic() - loading,
            "weights_gb": random_engine.weight_bytes(engine) / 1e9,
            "scratch_gb": engine.scratch_bytes / 1e9,
            "pages": pages,
            "caches_gb": pages * random_engine.page_bytes(config) / 1e9,
        },
    )
    failed, width = 0, limits.max_pages_per_sequence(config)
    for case in cases:
        name = {"step": "generate" if case.generate else case.name, "batch": case.requests}
        name |= {"context": case.context, "new": case.generate or case.new}
        inputs, shared = step_inputs(case, config, pages, width)
        name["shared_pages"] = shared
        if time.monotonic() - start > limit:
            result: dict[str, Any] = {"error": f"not run: {limit:.0f} s had gone"}
        else:
            result = attempt(engine, inputs, case, case_limit)
        if "error" not in result:
            result |= floor_fields(step_floors(config, case.requests, case.context, case.new))
            result |= routing_fields(engine, inputs, config)
        failed += "error" in result
        record(name, result)
    engine.close()
    return failed


def attempt(engine: DeviceEngine, inputs: StepInputs, case: Case, limit: float) -> dict[str, Any]:
    """Measure a case; what it failed with is its result."""
    try:
        return (generate if case.generate else measure)(engine, inputs, case, limit)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def routing_fields(engine: DeviceEngine, inputs: StepInputs, config: M3Config) -> dict[str, Any]:
    """Of a step's record: distinct experts a layer of a short step, those that its floor expects
    and those that its tokens choose."""
    fields: dict[str, Any] = {"router_bias": random_engine.ROUTER_BIAS}
    if inputs.input_ids.size > MOST_TOKENS:
        return fields
    weights = {name: binding.memory for name, binding in engine._bound.items()}
    expected = expected_experts(config, inputs.input_ids.size)
    emulated = emulated_experts(weights, config, inputs.input_ids)
    return fields | {"experts": {"expected": expected, "emulated": emulated}}


def page_count(config: M3Config, limits: BuildConfig, cases: Sequence[Case], free: int) -> int:
    """Pages of the largest case, or as many as the GPU's memory and the engine take."""
    block = config.tokens_per_block
    wanted = max(
        case.requests * -(-(case.context + case.new + case.generate) // block) for case in cases
    )
    weights = sum(spec.num_bytes for spec in rank_tensors(config).values())
    fit = (free - weights - HEADROOM) // random_engine.page_bytes(config)
    return int(min(wanted, limits.max_pages, fit))


def main(argv: Sequence[str] | None = None) -> int:
    """Append a record a case; 1 if one failed or was not run."""
    parser = argparse.ArgumentParser(
        prog="python -m m3trt.bench.slice",
        description="Time steps of real shapes with random weights.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("kind", choices=sorted(CASES), help="what to measure")
    parser.add_argument("--model_config", type=Path, required=True, help="a released config.json")
    parser.add_argument("--case_seconds", type=float, default=30.0, help="most for one case")
    parser.add_argument("--seconds", type=float, default=600.0, help="start no case after")
    args = parser.parse_args(argv)
    require_gpus(parser)
    config = model(args.kind, args.model_config)
    return int(run_cases(args.kind, config, args.case_seconds, args.seconds) > 0)


if __name__ == "__main__":
    sys.exit(main())
