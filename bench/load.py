"""Times the load of a rank's weights from a safetensors file of several GB onto one GPU.

python -m m3trt.bench.load --model_config tests/data/minimax_m3_config.json

Writes a file of random bytes in the shapes of one TP 8 rank with few layers, throws it out of the
page cache, and loads it twice: from the disk, then from the cache. Beside that, in the same run:
plain reads of the file past the page cache (O_DIRECT), its way from the cache into pinned memory,
and as many bytes from there to the GPU. Appends to results/load.jsonl.
"""

from __future__ import annotations

import argparse
import logging
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from m3trt.bench import random_engine
from m3trt.bench.device_time import median_seconds
from m3trt.bench.needs import require_gpus
from m3trt.bench.records import append_record, gpu
from m3trt.bench.slice import model
from m3trt.build.configuration import BuildConfig
from m3trt.build.library import PLUGIN_LIBRARY, describe, resolve_runtime
from m3trt.convert.configuration import M3Config
from m3trt.convert.layout import rank_tensors
from m3trt.convert.writer import TensorFile
from m3trt.runtime.tensorrt.device_engine import DeviceEngine
from m3trt.runtime.tensorrt.memory import PIECE, READERS, as_bytes, import_torch, pinned
from m3trt.runtime.weights import find_weights, map_weights

BLOCK = 64 << 20
CHECKED = 1 << 20
"""Bytes at both ends of every tensor that are compared after a load."""


def write_rank(path: Path, config: M3Config) -> None:
    """A file of the rank's tensors, random bytes, on the disk and not in the page cache."""
    specs = rank_tensors(config)
    noise = np.random.default_rng(0).integers(0, 256, BLOCK + 4096, np.uint8)
    file = TensorFile(path, specs)
    for name, spec in specs.items():
        for begin in range(0, spec.num_bytes, BLOCK):
            shift = begin // BLOCK % 4096
            piece = noise[shift : shift + min(BLOCK, spec.num_bytes - begin)]
            file.write(name, begin, piece)
    file.finish()
    file.close()
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


class AnonymousMemory:
    """The most anonymous memory that this process had inside a `with`, beyond that before it. Pages
    of the mapped file are the page cache's and do not count."""

    def __enter__(self) -> AnonymousMemory:
        self._before = self.peak = _anonymous_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self.peak -= self._before

    def _sample(self) -> None:
        while not self._ended.wait(0.01):
            self.peak = max(self.peak, _anonymous_bytes())


def _anonymous_bytes() -> int:
    """Anonymous and pinned memory, which the kernel books as shared."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = [int(x.split()[1]) for x in lines if x.startswith(("RssAnon:", "RssShmem:"))]
    return sum(kilobytes) * 1024


def check(engine: DeviceEngine, path: Path) -> None:
    """Compare both ends of every tensor on the GPU with the file.

    Raises:
        AssertionError: they differ.
    """
    for name, array in map_weights(path, find_weights(path)).items():
        memory, source = engine._bound[name].memory, as_bytes(array)
        for part in (slice(0, CHECKED), slice(max(0, source.size - CHECKED), source.size)):
            assert (memory[part].cpu().numpy() == source[part]).all(), name


def load(path: Path, engine_path: Path, library: str) -> dict[str, Any]:
    """Seconds and host memory of one load."""
    torch = import_torch()
    engine = DeviceEngine(engine_path, library, PLUGIN_LIBRARY)
    torch.empty(1, pin_memory=True)  # the first pinned allocation makes torch's pool
    with AnonymousMemory() as memory:
        start = time.monotonic()
        engine.bind_weights(path)
        torch.cuda.synchronize()
        seconds = time.monotonic() - start
    check(engine, path)
    engine.close()
    torch.cuda.empty_cache()
    return {"seconds": seconds, "host_bytes": memory.peak}


def read_seconds(path: Path, buffers: memoryview, flags: int = 0) -> float:
    """Seconds of reading the file and nothing else, by as many threads as a load has."""
    descriptor, size = os.open(path, os.O_RDONLY | flags), path.stat().st_size

    def read(reader: int) -> int:
        buffer = buffers[reader * PIECE :][:PIECE]
        begins = range(reader * PIECE, size, READERS * PIECE)
        return sum(os.preadv(descriptor, [buffer], begin) for begin in begins)

    start = time.monotonic()
    with ThreadPoolExecutor(READERS) as readers:
        length = sum(readers.map(read, range(READERS)))
    seconds = time.monotonic() - start
    os.close(descriptor)
    assert length == size, f"{length} of {size} bytes were read"
    return seconds


def plain_read(path: Path, source: str) -> tuple[str, float]:
    """What a load from there stands beside, and its seconds."""
    size = READERS * PIECE
    if source == "disk":
        aligned = memoryview(mmap.mmap(-1, size))
        return "O_DIRECT reads", read_seconds(path, aligned, os.O_DIRECT)
    host = memoryview(pinned(size).numpy())
    return "page cache to pinned memory", min(read_seconds(path, host) for _ in range(3))


def copy_rate() -> float:
    """Bytes a second that pinned memory reaches the GPU at."""
    torch = import_torch()
    size = 1 << 30
    host = pinned(size)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()
    return size / median_seconds(lambda: device.copy_(host, non_blocking=True), stream, 3)


def main(argv: Sequence[str] | None = None) -> int:
    """Append a record a load."""
    parser = argparse.ArgumentParser(
        prog="python -m m3trt.bench.load",
        description="Time the load of weights.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model_config", type=Path, required=True, help="a released config.json")
    parser.add_argument("--layers", type=int, default=3, help="layers, the first one dense")
    parser.add_argument("--folder", type=Path, default=None, help="where the file is written")
    args = parser.parse_args(argv)
    require_gpus(parser)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sparse = (False, *[True] * (args.layers - 1))
    config = replace(
        model("rank", args.model_config),
        num_hidden_layers=args.layers,
        sparse_layers=sparse,
        moe_layers=sparse,
    )
    sizes = [spec.num_bytes for spec in rank_tensors(config).values()]
    library, device, rate = resolve_runtime("auto"), gpu(), copy_rate()
    versions = {library: describe(library).version, "torch": import_torch().__version__}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        random_engine.build(config, BuildConfig.for_model(config), library, Path(folder))
        path = Path(folder, "rank0.safetensors")
        write_rank(path, config)
        copies = {"pinned memory to the GPU": sum(sizes) / rate}
        for source in ("disk", "page cache"):
            beside, reading = plain_read(path, source)
            baselines = copies | {beside: reading}
            result = load(path, path.with_suffix(".engine"), library)
            record = {
                "case": {"source": source, "bytes": sum(sizes), "tensors": len(sizes)},
                "seconds": result["seconds"],
                "floor_seconds": sum(sizes) / rate,
                "bound": "bytes",
                "rate": sum(sizes) / result["seconds"] / 1e9,
                "rate_unit": "GB/s",
                "host_bytes": result["host_bytes"],
                "largest_tensor_bytes": max(sizes),
                "baselines": baselines,
                "runs": 1,
            }
            append_record("load", device | record, versions)
            print(
                f"load from {source}: {sum(sizes) / 1e9:.2f} GB in {result['seconds']:.2f} s,"
                f" {record['rate']:.1f} GB/s (pinned copies {rate / 1e9:.1f} GB/s, {beside}"
                f" {sum(sizes) / reading / 1e9:.1f} GB/s), host memory"
                f" {result['host_bytes'] / 1e9:.2f} GB, largest tensor {max(sizes) / 1e9:.2f} GB"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
