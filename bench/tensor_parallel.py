"""Steps of a slice of the released model on several GPUs, beside the same slice on one.

python -m m3trt.bench.tensor_parallel --model_config tests/data/minimax_m3_config.json --tp_size 2

One process a rank. Weights and caches are random and the same in both runs, so that the logits can
be compared. Also times the collectives alone, as they run in a captured step.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from m3trt.bench import random_engine
from m3trt.bench.device_time import LINK_BYTES, breakdown, graph_of, median_seconds
from m3trt.bench.floors import floor_fields, step_floors
from m3trt.bench.needs import require_gpus
from m3trt.bench.ranks import run_ranks
from m3trt.bench.records import append_record, gpu
from m3trt.bench.slice import Case, model, step_inputs
from m3trt.build import tensors
from m3trt.build.configuration import BuildConfig
from m3trt.build.library import PLUGIN_LIBRARY, describe, resolve_runtime
from m3trt.convert.configuration import M3Config
from m3trt.runtime.bindings import step_arrays
from m3trt.runtime.tensorrt.device_engine import DeviceEngine
from m3trt.runtime.tensorrt.memory import import_torch
from m3trt.runtime.tensorrt.nccl import Communicator, check, load_nccl, unique_id

CASES = (
    *(Case(requests, context) for context in (1024, 61440) for requests in (1, 8, 32)),
    Case(1, 0, new=8192),
)
ROWS = (1, 8, 32, 128, 1024, 8192)
REPLAYS, EAGER_RUNS = 20, 3
CALLS = 40
"""Collectives in a row in the graph that times them."""

LAUNCH_SECONDS = 0.85e-6
"""What an empty kernel of a graph takes."""


@dataclass(frozen=True, slots=True)
class Group:
    """What all ranks of a run share. Every rank must launch the same steps in the same order, so
    nothing here depends on the clock."""

    config: M3Config
    whole: M3Config
    library: str
    engine: Path
    pages: int
    width: int
    unique_id: bytes


def run_rank(connection: Connection, rank: int, group: Group) -> None:
    """Send a dict a case, with logits, then the times of the collectives."""
    logging.basicConfig(level=logging.INFO, format=f"rank {rank}: %(message)s")
    torch, size = import_torch(), group.config.tp_size
    torch.cuda.set_device(rank)
    engine = random_engine.load(
        group.engine, group.config, group.library, group.pages, rank, group.whole
    )
    member = Communicator(size, rank, group.unique_id, PLUGIN_LIBRARY) if size > 1 else None
    for case in CASES:
        connection.send(run_case(engine, group, case))
    if member is not None:
        connection.send(run_collectives(member, group.config, engine.stream))
    engine.close()
    if member is not None:
        member.close()


def run_case(engine: DeviceEngine, group: Group, case: Case) -> dict[str, Any]:
    """Logits and times of a step, decode captured, context eager."""
    inputs, _ = step_inputs(case, group.config, group.pages, group.width)
    feeds = step_arrays(inputs)
    eager = engine.run(feeds, tensors.LOGITS)
    if case.new > 1:
        run: Callable[[], Any] = lambda: engine.run(feeds, tensors.LOGITS)  # noqa: E731
        return {
            "logits": eager,
            "seconds": median_seconds(run, engine.stream, EAGER_RUNS),
            "runs": EAGER_RUNS,
            "captured": False,
            "ops": breakdown(run),
        }
    first, again = (engine.run_captured(feeds, tensors.LOGITS) for _ in range(2))
    graph = engine.captured(feeds).graph
    return {
        "logits": eager,
        "same_bits": eager.tobytes() == first.tobytes() == again.tobytes(),
        "seconds": median_seconds(graph.replay, engine.stream, REPLAYS),
        "runs": REPLAYS,
        "captured": True,
        "ops": breakdown(graph.replay),
    }


def run_collectives(member: Communicator, config: M3Config, stream: Any) -> list[dict[str, Any]]:
    """Seconds of the collectives of a step with so many rows: their sums and their logits."""
    torch, nccl, results = import_torch(), load_nccl(), []
    size, comm = config.tp_size, member.handle

    def pointer(memory: Any) -> ctypes.c_void_p:
        return ctypes.c_void_p(memory.data_ptr())

    def timed(call: str, *arguments: Any) -> float:
        def launch() -> None:
            status = getattr(nccl, call)(*arguments, comm, ctypes.c_void_p(stream.cuda_stream))
            check(nccl, call, status)

        graph = graph_of([launch] * CALLS, stream)
        graph.replay()
        return median_seconds(graph.replay, stream, 9) / CALLS

    float32, bfloat16, summed = 7, 9, 0
    for rows in ROWS:
        x = torch.zeros(rows * config.hidden_size, dtype=torch.bfloat16, device="cuda")
        y = torch.empty_like(x)
        count = ctypes.c_size_t(x.numel())
        seconds = timed("ncclAllReduce", pointer(x), pointer(y), count, bfloat16, summed)
        results.append({"op": "all_reduce", "rows": rows, "bytes": x.numel() * 2, "s": seconds})
    for rows in ROWS[:3]:
        x = torch.zeros(rows * config.local_vocab_size, dtype=torch.float32, device="cuda")
        y = torch.empty(x.numel() * size, dtype=torch.float32, device="cuda")
        count = ctypes.c_size_t(x.numel())
        seconds = timed("ncclAllGather", pointer(x), pointer(y), count, float32)
        results.append({"op": "all_gather", "rows": rows, "bytes": y.numel() * 4, "s": seconds})
    return results


def estimate(seconds: float, smallest: float, size: int, target: int) -> float:
    """Seconds of an all-reduce among `target` ranks from that among `size`, as a ring has them:
    2 (n - 1) hops, each of which waits for the one before, and 2 (n - 1) / n of the bytes.

    `smallest` is the least time of all rows, which is all latency. Not a measurement.
    """
    hops = (target - 1) / (size - 1)
    latency = LAUNCH_SECONDS + (smallest - LAUNCH_SECONDS) * hops
    return latency + (seconds - smallest) * hops * size / target


def likeness(ours: Any, theirs: Any) -> dict[str, float]:
    """How far two runs' logits are apart; rounding moves a few rows to other experts or blocks."""
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    rows = (a * b).sum(axis=1) / norms
    return {
        "cosine": float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)),
        "worst_row_cosine": float(rows.min()),
        "same_choice": float((a.argmax(axis=1) == b.argmax(axis=1)).mean()),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Append a record a case and collective; 1 if captured and eager steps or ranks differ."""
    parser = argparse.ArgumentParser(
        prog="python -m m3trt.bench.tensor_parallel",
        description="Time steps of a slice on several GPUs, and its collectives.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model_config", type=Path, required=True, help="a released config.json")
    parser.add_argument("--tp_size", type=int, default=2, help="GPUs; they must divide 4")
    args = parser.parse_args(argv)
    require_gpus(parser, args.tp_size)
    library, device = resolve_runtime("auto"), gpu()
    versions = {library: describe(library).version, "torch": import_torch().__version__}
    whole = model("slice", args.model_config)
    block = whole.tokens_per_block
    pages = max(case.requests * -(-(case.context + case.new) // block) for case in CASES)
    answers: dict[int, list[list[Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in (1, args.tp_size):
            config = replace(whole, tp_size=size)
            limits = BuildConfig.for_model(
                config,
                max_batch_size=max(case.requests for case in CASES),
                max_num_tokens=max(case.requests * case.new for case in CASES),
                max_seq_len=max(case.context + case.new for case in CASES) + block,
            )
            target = Path(folder, str(size))
            target.mkdir()
            random_engine.build(config, limits, library, target, collectives=True)
            group = Group(
                config,
                whole,
                library,
                target / "rank0.engine",
                pages,
                limits.max_pages_per_sequence(config),
                unique_id() if size > 1 else b"",
            )
            answers[size] = run_ranks(size, len(CASES) + (size > 1), run_rank, group)
    failed = False
    for index, case in enumerate(CASES):
        alone = answers[1][index][0]["logits"]
        for size in answers:
            config, results = replace(whole, tp_size=size), answers[size][index]
            logits, result = [one.pop("logits") for one in results], results[0]
            if size > 1:
                result |= likeness(logits[0], alone)
                result["ranks_agree"] = all(x.tobytes() == logits[0].tobytes() for x in logits)
            floors = step_floors(config, case.requests, case.context, case.new, collectives=True)
            result |= floor_fields(floors) | {"router_bias": random_engine.ROUTER_BIAS}
            failed |= not (result.get("same_bits", True) and result.get("ranks_agree", True))
            name = {"model": "slice", "layers": whole.num_hidden_layers, "tp_size": size}
            name |= {"dtype": whole.dtype, "step": case.name, "batch": case.requests}
            name |= {"context": case.context, "new": case.new, "shared_pages": False}
            name |= {"bench": "tensor_parallel"}
            append_record("slice", device | {"case": name} | result, versions)
            shown = {k: v for k, v in result.items() if k not in ("floors", "work")}
            print(json.dumps(name | shown), flush=True)
    collectives = answers[args.tp_size][-1][0]
    for result in collectives:
        record_collective(result, collectives, args.tp_size, device, versions)
    return int(failed)


def record_collective(
    result: dict[str, Any],
    others: Sequence[dict[str, Any]],
    size: int,
    device: dict[str, str],
    versions: dict[str, str],
) -> None:
    """Append the record of one collective, with what eight ranks would take."""
    seconds, op = result["s"], result["op"]
    sent = result["bytes"] * (size - 1) / size * (2 if op == "all_reduce" else 1)
    smallest = min(other["s"] for other in others if other["op"] == op)
    record = {
        "case": {"op": op, "rows": result["rows"], "bytes": result["bytes"], "ranks": size},
        "seconds": seconds,
        "floor_seconds": sent / LINK_BYTES,
        "bound": "bytes",
        "rate": sent / seconds / 1e12,
        "rate_unit": "TB/s",
        "baselines": {},
        "estimates": {"tp 8": estimate(seconds, smallest, size, 8)},
        "runs": 9,
    }
    append_record("collectives", device | record, versions)
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    sys.exit(main())
