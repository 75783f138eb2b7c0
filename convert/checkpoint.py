"""Fills a checkpoint directory: one pass over the source, all ranks at once.

Every worker takes a source tensor, reads it in slices of a few megabytes, converts them and writes
each rank's share to its place, so memory does not grow with the checkpoint or with the ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
from m3trt.convert.configuration import M3Config
from m3trt.convert.dtypes import SCALE_BLOCK, cast, dequantise, gemma_scale
from m3trt.convert.errors import ConvertError
from m3trt.convert.plan import Job, Plan
from m3trt.convert.progress import Progress
from m3trt.convert.reader import FileReader, StoredTensor
from m3trt.convert.weights import Transform
from m3trt.convert.writer import TensorFile

SLICE_ELEMENTS = 1 << 21
"""Values that one worker holds at a time; with temporaries 30 MB at most."""

COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "special_tokens_map.json",
)


def copy_files(source: Path, directory: Path) -> None:
    """Copy the tokenizer and template files that `source` has; a broken link is an OSError."""
    for name in COPIED_FILES:
        if os.path.lexists(source / name):
            shutil.copyfile(source / name, directory / name)


def write_config(model_dir: Path, directory: Path, config: M3Config) -> None:
    """Store `config.json` and copy the tokenizer and template files."""
    copy_files(model_dir, directory)
    with (directory / "config.json").open("w", encoding="utf-8") as file:
        json.dump(config.to_json(), file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def check_space(plan: Plan, output_dir: Path) -> None:
    """Raise ConvertError if the disk cannot hold the result."""
    existing = next(path for path in output_dir.absolute().parents if path.exists())
    free = shutil.disk_usage(existing).free
    if plan.output_bytes > free:
        raise ConvertError(
            f"{existing}: {free / 1e9:.2f} GB free, expected at least"
            f" {plan.output_bytes / 1e9:.2f} GB for the output: make room or choose another"
            " --output_dir"
        )


def write_weights(plan: Plan, directory: Path, workers: int) -> Progress:
    """Fill every file of `plan` in `directory`.

    Raises:
        ConvertError: a source cannot be read, or the disk is full.
    """
    progress, stop = Progress(plan.source_bytes), threading.Event()
    with ExitStack() as stack:
        stack.callback(progress.close)
        reader = stack.enter_context(closing(FileReader()))
        files = {
            name: stack.enter_context(closing(TensorFile(directory / name, tensors)))
            for name, tensors in plan.files.items()
        }
        pool = stack.enter_context(ThreadPoolExecutor(workers, "convert"))
        pending: set[Future[None]]
        try:
            pending = {pool.submit(_run, job, reader, files, progress, stop) for job in plan.jobs}
            while pending:
                done, pending = wait(pending, timeout=0.5, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                progress.show()
        except BaseException:
            stop.set()  # the workers end at their next slice
            pool.shutdown(cancel_futures=True)
            raise
        for file in files.values():
            file.finish()
    return progress


def _run(
    job: Job,
    reader: FileReader,
    files: dict[str, TensorFile],
    progress: Progress,
    stop: threading.Event,
) -> None:
    step = max(1, SLICE_ELEMENTS // job.columns)
    for first in range(0, job.rows, step):
        if stop.is_set():
            return
        rows = range(first, min(first + step, job.rows))
        values = _load(job, reader, rows)
        for copy in job.copies:
            start, end = max(rows.start, copy.rows.start), min(rows.stop, copy.rows.stop)
            if start >= end:
                continue
            piece = values[start - first : end - first, copy.columns.start : copy.columns.stop]
            position = copy.first + (start - copy.rows.start) * len(copy.columns)
            files[copy.file].write(copy.target, position, np.ascontiguousarray(piece))
        progress.add(job.num_bytes * len(rows) // job.rows)
    reader.forget(job.source)


def _load(job: Job, reader: FileReader, rows: range) -> npt.NDArray[np.generic]:
    """Some rows of the source, as [rows, columns] of the target's dtype."""

    def read(tensor: StoredTensor, columns: int) -> npt.NDArray[np.generic]:
        values = reader.read(tensor, rows.start * columns, len(rows) * columns)
        return values.reshape(len(rows), columns)

    values = read(job.source, job.columns)
    if job.scales:
        scales = read(job.scales, job.columns // SCALE_BLOCK).view(np.uint8)
        if (scales == 255).any():
            raise ConvertError(
                f"{job.scales}: found a scale of 255, which is NaN, expected at most 254"
            )
        return dequantise(values.view(np.uint8), scales, job.dtype)
    if job.transform is Transform.GEMMA:
        return gemma_scale(values, job.dtype)
    return cast(values, job.dtype)
