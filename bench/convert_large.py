"""Converts generated checkpoints of several GB and records time and peak memory.

python -m m3trt.bench.convert_large [--work_dir out/convert_large]

The checkpoint has the released widths (one dense and one MoE layer with 32 experts, full
vocabulary, no vision tower). Its values are one random block over and over: moving them counts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from m3trt.bench.records import append_record
from m3trt.convert.dtypes import SCALE_BLOCK
from m3trt.convert.hf_config import SourceModel, load_source
from m3trt.convert.layout import TensorSpec
from m3trt.convert.plan import SCALE_SUFFIX, expand
from m3trt.convert.reader import SINGLE_FILE, read_header
from m3trt.convert.tiny_config import quantization_config, tiny_config
from m3trt.convert.weights import TEXT_RULES, dimensions
from m3trt.convert.writer import encode_header

CASES = (("bfloat16", 1), ("bfloat16", 8), ("mxfp8", 8))
PEAK_LIMIT_GB = 3.0
BLOCK = 1 << 22
"""Small, because a child's ru_maxrss is at least that of the process that started it."""


class Measurement(NamedTuple):
    source_gb: float
    seconds: float
    peak_rss_gb: float
    copy_seconds: float


def large_config(source: str) -> dict[str, Any]:
    """A released-spelling config of 9.1 GB in bf16; `source` is "bfloat16" or "mxfp8"."""
    data = tiny_config("demo")
    del data["vision_config"]
    text = data["text_config"]
    text |= {"hidden_size": 6144, "num_hidden_layers": 2, "num_attention_heads": 64}
    text |= {"dense_intermediate_size": 12288, "num_local_experts": 32, "moe_layer_freq": [0, 1]}
    text |= {"intermediate_size": 3072, "shared_intermediate_size": 3072}
    flags = {"sparse_attention_freq": [0, 1], "sparse_disable_index_value": [0, 1]}
    text["sparse_attention_config"] |= flags
    if source == "mxfp8":
        data["quantization_config"] = quantization_config(text)
    return data


def source_tensors(model: SourceModel) -> Iterator[tuple[str, TensorSpec]]:
    """Every tensor of the checkpoint to generate."""
    sizes = dimensions(model.config)
    for rule, name, _ in expand(TEXT_RULES, model.config):
        shape = tuple(sizes[symbol] for symbol in rule.shape.split())
        if rule.linear and model.quantization and model.quantization.covers(name):
            yield name, TensorSpec(shape, "F8_E4M3")
            scales = (shape[0], shape[1] // SCALE_BLOCK)
            yield name + SCALE_SUFFIX, TensorSpec(scales, "U8")
        else:
            router = rule.target.endswith(("router.weight", "score_correction_bias"))
            yield name, TensorSpec(shape, "F32" if router else "BF16")


def generate(source: str, model_dir: Path) -> int:
    """Write the checkpoint, out of the page cache again; returns its size in bytes."""
    model_dir.mkdir(parents=True)
    (model_dir / "config.json").write_text(json.dumps(large_config(source)))
    header, _ = encode_header(dict(source_tensors(load_source(model_dir))))
    total = sum(spec.num_bytes for _, spec in source_tensors(load_source(model_dir)))
    # Bytes below 0x70: finite in every dtype, and no NaN among the scales.
    block = np.random.default_rng(0).integers(0, 0x70, BLOCK, dtype=np.uint8).tobytes()
    with (model_dir / SINGLE_FILE).open("wb") as file:
        file.write(header)
        for start in range(0, total, BLOCK):
            file.write(block[: min(BLOCK, total - start)])
        _drop_from_cache(file.fileno())
    return len(header) + total


def _drop_from_cache(descriptor: int) -> None:
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def copy_seconds(model_dir: Path, copy: Path) -> float:
    """Time to read the source and write it once more: what the disk allows."""
    start = time.monotonic()
    with (model_dir / SINGLE_FILE).open("rb") as source, copy.open("wb") as target:
        shutil.copyfileobj(source, target, BLOCK)
        os.fsync(target.fileno())
        seconds = time.monotonic() - start
        _drop_from_cache(source.fileno())
    copy.unlink()
    return seconds


def measure(source: str, tp_size: int, work_dir: Path) -> Measurement:
    """Generate, convert in a process of its own, check the outputs' headers, clean up.

    Raises:
        RuntimeError: the conversion failed.
    """
    model_dir, output = work_dir / "source", work_dir / "output"
    shutil.rmtree(work_dir, ignore_errors=True)
    try:
        size = generate(source, model_dir)
        copied = copy_seconds(model_dir, work_dir / "copy")
        command = [sys.executable, "-m", "m3trt.convert", "--model_dir", str(model_dir)]
        command += ["--output_dir", str(output), "--tp_size", str(tp_size)]
        start = time.monotonic()
        process = subprocess.Popen(command)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
        for rank in range(tp_size):
            read_header(output / f"rank{rank}.safetensors")
        return Measurement(size / 1e9, seconds, usage.ru_maxrss * 1024 / 1e9, copied)
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)


def record_case(source: str, tp_size: int, work_dir: Path) -> dict[str, Any]:
    """Measure one case, append its record and print it.

    Raises:
        RuntimeError: the conversion failed.
    """
    result = measure(source, tp_size, work_dir)
    record = {
        "case": {
            "source": source,
            "source_gb": round(result.source_gb, 2),
            "tp_size": tp_size,
            "dtype": "bfloat16",
        },
        "seconds": round(result.seconds, 1),
        "floor_seconds": None,
        "bound": "bytes",
        "rate": round(result.source_gb / result.seconds, 3),
        "rate_unit": "GB/s read",
        "peak_rss_gb": round(result.peak_rss_gb, 3),
        "baselines": {"read and write the source once": round(result.copy_seconds, 1)},
        "runs": 1,
    }
    append_record("convert", record, {"numpy": np.__version__, "ml_dtypes": ml_dtypes.__version__})
    print(json.dumps(record))
    return record


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and record all cases; 1 if one needs more memory than allowed."""
    parser = argparse.ArgumentParser(
        prog="python -m m3trt.bench.convert_large",
        description="Convert checkpoints of several GB; record time and peak memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--work_dir", type=Path, default="out/convert_large", help="30 GB of free space"
    )
    work_dir = parser.parse_args(argv).work_dir
    records = [record_case(source, tp_size, work_dir) for source, tp_size in CASES]
    return int(any(record["peak_rss_gb"] >= PEAK_LIMIT_GB for record in records))


if __name__ == "__main__":
    sys.exit(main())
