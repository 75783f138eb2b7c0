"""Writes a directory whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from m3trt.convert.errors import ConvertError
from m3trt.convert.interrupt import uninterrupted


def check_output(output_dir: Path) -> None:
    """Raise ConvertError if anything is already there."""
    if os.path.lexists(output_dir):
        raise ConvertError(f"{output_dir} already exists: remove it or choose another --output_dir")


@contextmanager
def new_directory(output_dir: Path) -> Iterator[Path]:
    """A directory beside `output_dir` that takes its name at the end, or vanishes on any error.

    Raises:
        ConvertError: `output_dir` exists, or its parent cannot hold it.
    """
    check_output(output_dir)
    partial = output_dir.parent / f".{output_dir.name}.partial-{os.getpid()}"
    try:
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise ConvertError(
            f"{output_dir} cannot be created: {error.filename}: {error.strerror}. Choose another"
            " --output_dir"
        ) from error
    try:
        yield partial
        check_output(output_dir)
        partial.rename(output_dir)
    except BaseException:
        with uninterrupted():
            shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync_directory(output_dir.parent)


def _sync_directory(path: Path) -> None:
    """So that the new name survives a crash, where the file system can promise that."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
