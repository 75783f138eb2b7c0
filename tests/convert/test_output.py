"""Outputs that cannot be written, or not to the end: nothing half written stays behind."""

from __future__ import annotations

import errno
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from m3trt.convert import checkpoint

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("flags", [[], ["--save_config_only"]])
def test_existing_output(
    source: Path, fails: Callable[..., str], tmp_path: Path, flags: list[str]
) -> None:
    (tmp_path / "output").mkdir()
    assert f"{tmp_path / 'output'} already exists: remove it or choose" in fails(source, *flags)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 0.4 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_disk_too_small(source: Path, convert: Callable[..., Any], small_disk: Path) -> None:
    """Known before anything is written."""
    result = convert(source, output=small_disk / "new" / "output")
    assert result.code == 1
    assert f"{small_disk}: 0.00 GB free, expected at least" in result.err
    assert list(small_disk.iterdir()) == []


def test_disk_runs_full(
    source: Path,
    convert: Callable[..., Any],
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody else takes the space in the meantime."""
    monkeypatch.setattr(checkpoint, "check_space", lambda *_: None)
    result = convert(source, output=small_disk / "output")
    assert result.code == 1
    assert os.strerror(errno.ENOSPC) in result.err
    assert "make room or choose another --output_dir" in result.err
    assert ".safetensors: writing " in result.err
    assert list(small_disk.iterdir()) == []


def test_file_size_limit(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "m3trt.convert", "--model_dir", str(source)]
    command += ["--output_dir", str(tmp_path / "output")]
    result = subprocess.run(
        command,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert os.strerror(errno.EFBIG) in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.fixture
def listening() -> Iterator[None]:
    """Signals as a shell's foreground command has them: a background job ignores SIGINT."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted(
    source: Path,
    convert: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    listening: None,
    number: signal.Signals,
) -> None:
    """Once, and again and again while it cleans up."""
    real, calls = checkpoint._load, []

    def load(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) >= 20:
            os.kill(os.getpid(), number)
        if len(calls) >= 20:
            time.sleep(0.2)
        return real(*arguments)

    monkeypatch.setattr(checkpoint, "_load", load)
    result = convert(source, "--workers", "2")
    assert (result.code, result.out) == (130, "")
    assert "interrupted: nothing was written" in result.err
    assert len(calls) < 60, "the workers stop at once"
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_parent_that_is_a_file(source: Path, fails: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file" / "output", tmp_path / "file" / "deep" / "output"):
        message = fails(source, output=output)
        assert f"{output} cannot be created: {tmp_path / 'file'}" in message
        assert "Choose another --output_dir" in message


def test_file_system_that_cannot_sync_directories(
    source: Path, convert: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert convert(source).code == 0
