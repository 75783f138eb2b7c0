"""The command: what it refuses, what it says, and its exit codes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from m3trt.serve.__main__ import main
from m3trt.serve.binary import ServeError, check_stub

ROOT = Path(__file__).resolve().parents[2]


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> str:
    run_dir = tmp_path / "run"
    assert main(["--http_port", "0", "--run_dir", str(run_dir), *arguments]) == 1
    return capsys.readouterr().err


@pytest.mark.smoke
def test_what_cannot_be_served(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, engine_dir: Path
) -> None:
    missing = refused(capsys, tmp_path / "1", "--engine_dir", str(tmp_path / "none"))
    assert "config.json does not exist" in missing
    engine = ["--engine_dir", str(engine_dir)]
    unknown = refused(capsys, tmp_path / "2", *engine, "--set", "no_such_setting=1")
    assert "unknown settings ['no_such_setting']" in unknown
    wrong = refused(capsys, tmp_path / "3", *engine, "--set", "max_queue_size=many")
    assert "max_queue_size is 'many'" in wrong
    binary = refused(capsys, tmp_path / "4", *engine, "--tritonserver", str(tmp_path / "none"))
    assert "no executable file" in binary
    executor = refused(capsys, tmp_path / "5", *engine, "--executor", "tensorrt")
    assert "cannot run with tensorrt" in executor
    assert "before it was ready" not in executor, "no server was started for it"
    moved = tmp_path / "moved"
    shutil.copytree(engine_dir, moved, symlinks=True)
    (moved / "rank0.safetensors").unlink()
    (moved / "rank0.safetensors").symlink_to("gone.safetensors")
    links = refused(capsys, tmp_path / "6", "--engine_dir", str(moved))
    assert "is a broken link to gone.safetensors" in links
    assert "before it was ready" not in links, "no server was started for it"
    with pytest.raises(SystemExit):
        main([*engine, "--executor", "onnx"])
    assert "invalid choice: 'onnx'" in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").touch()
    assert "is not empty" in refused(capsys, tmp_path, *engine)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("flag", "name", "message"),
    [
        ("--run_dir", "a b", "holds [' '], expected ASCII letters, digits"),
        ("--run_dir", "$(x)", "holds ['$', '(', ')']"),
        ("--engine_dir", "größe", "holds ['ß', 'ö'], expected ASCII"),
    ],
)
def test_paths_that_model_processes_cannot_use(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    engine_dir: Path,
    flag: str,
    name: str,
    message: str,
) -> None:
    arguments = ["--engine_dir", str(engine_dir), flag, str(tmp_path / name)]
    assert message in refused(capsys, tmp_path, *arguments)


@pytest.mark.smoke
def test_a_port_in_use(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, engine_dir: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        error = refused(capsys, tmp_path, "--engine_dir", str(engine_dir), "--grpc_port", str(port))
    assert f"--grpc_port {port} cannot be used" in error


@pytest.mark.full
def test_a_model_that_cannot_load_shows_the_log(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, engine_dir: Path
) -> None:
    python = ROOT / ".venv" / "models" / "bin" / "python"
    command = [str(python), "-m", "m3trt.serve", "--engine_dir", str(engine_dir)]
    command += ["--http_port", "0", "--run_dir", str(tmp_path / "run")]
    command += ["--set", "executor=tensorrt"]  # --executor would be refused before
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "before it was ready" in result.stderr
    assert "cannot run with tensorrt" in result.stderr


@pytest.mark.full
def test_a_command_runs_against_the_server_and_gives_its_exit_code(
    tmp_path: Path, engine_dir: Path
) -> None:
    python = ROOT / ".venv" / "models" / "bin" / "python"
    client = [sys.executable, str(ROOT / "triton_repo" / "serve" / "demo.py")]
    command = [str(python), "-m", "m3trt.serve", "--engine_dir", str(engine_dir)]
    command += ["--http_port", "0", "--run_dir", str(tmp_path / "run"), "--run", *client]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("assistant:") == 2
    assert (tmp_path / "run" / "picture.png").exists()
    assert str(tmp_path / "run") in result.stdout


@pytest.mark.full
def test_an_interrupt_while_starting(tmp_path: Path, engine_dir: Path) -> None:
    python = ROOT / ".venv" / "models" / "bin" / "python"
    command = [str(python), "-m", "m3trt.serve", "--engine_dir", str(engine_dir)]
    command += ["--http_port", "0", "--run_dir", str(tmp_path / "run")]
    process = subprocess.Popen(command)
    while not (tmp_path / "run" / "tritonserver.log").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert not list(Path("/dev/shm").glob(f"m3trt_{process.pid}_*"))


@pytest.mark.full
def test_a_model_process_that_is_killed_while_starting(tmp_path: Path, engine_dir: Path) -> None:
    """As by a lack of memory. The server itself would wait for it for ever."""
    python = ROOT / ".venv" / "models" / "bin" / "python"
    command = [str(python), "-m", "m3trt.serve", "--engine_dir", str(engine_dir)]
    command += ["--http_port", "0", "--run_dir", str(tmp_path / "run")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (found := llm_processes(tmp_path)):
        assert process.poll() is None
    os.kill(found[0], signal.SIGKILL)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert f"model process {found[0]} ended before the server was ready" in error
    assert not list(Path("/dev/shm").glob(f"m3trt_{process.pid}_*"))


def llm_processes(folder: Path) -> list[int]:
    """Processes of `tensorrt_llm` that run from `folder`."""
    model = str(folder / "run" / "repository" / "tensorrt_llm" / "1" / "model.py").encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if model in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


@pytest.mark.smoke
def test_a_stub_that_cannot_start(tmp_path: Path) -> None:
    """A fresh Debian has no libpython; the server would wait for its models for ever."""
    stub = tmp_path / "backends" / "python" / "triton_python_backend_stub"
    stub.parent.mkdir(parents=True)
    stub.write_text("#!/bin/sh\necho 'stub: error while loading shared libraries: libx' >&2\n")
    stub.chmod(0o755)
    with pytest.raises(ServeError, match=r"libx\nFor libpython3.*fetch_libpython"):
        check_stub(tmp_path / "bin" / "tritonserver")
