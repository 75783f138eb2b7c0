"""Builds in processes of their own, and what remains after one is interrupted."""

from __future__ import annotations

import functools
import operator
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from m3trt.build.builder import BuildError, BuildReport
from m3trt.build.workers import build_all

pytestmark = pytest.mark.smoke

RUN = operator.methodcaller("run")
REPORT = functools.partial(BuildReport, 1.0, 2, 3)


def interrupted():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
    return REPORT()


def task(name, run):
    """Stands for a build: the worker's process calls `run`."""
    return SimpleNamespace(name=name, run=run)


def test_every_build_is_reported():
    done = {}
    tasks = [task("rank0", REPORT), task("vision", REPORT)]
    build_all(tasks, 1, lambda task, report: done.update({task.name: report}), RUN)
    assert done == {"rank0": BuildReport(1.0, 2, 3), "vision": BuildReport(1.0, 2, 3)}


def test_a_dead_process_is_an_error_that_names_the_engine():
    tasks = [task("rank0", functools.partial(os._exit, 3))]
    with pytest.raises(BuildError, match="building rank0 ended with exit code 3"):
        build_all(tasks, 1, lambda *_: None, RUN)


def test_a_failure_ends_the_other_builds():
    tasks = [task("rank0", functools.partial(time.sleep, 60)), task("vision", "not callable")]
    start = time.monotonic()
    with pytest.raises(BuildError, match="not callable"):
        build_all(tasks, 2, lambda *_: None, RUN)
    assert time.monotonic() - start < 30


def test_builds_leave_ctrl_c_to_their_parent():
    done = []
    build_all([task("rank0", interrupted)], 1, lambda task, report: done.append(report), RUN)
    assert done == [BuildReport(1.0, 2, 3)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_killed_build_leaves_no_engine_directory(checkpoint, tmp_path, number):
    # The build hangs where TensorRT would work, with everything else already written.
    script = """if True:
        import functools, operator, sys, time
        from types import SimpleNamespace
        from m3trt.build import __main__, assemble, workers

        def hang(tasks, count, on_done):
            sleep = SimpleNamespace(name="rank0", run=functools.partial(time.sleep, 60))
            print("building", flush=True)
            workers.build_all([sleep], 1, on_done, operator.methodcaller("run"))

        assemble.build_all = hang
        assemble.Environment.current = classmethod(lambda cls, *_: None)
        sys.exit(__main__.main(sys.argv[1:]))
    """
    output = tmp_path / "engine"
    options = [
        "--checkpoint_dir",
        checkpoint(),
        "--output_dir",
        output,
        "--runtime",
        "tensorrt_rtx",
    ]
    with subprocess.Popen(
        [sys.executable, "-c", script, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # ignored in the background
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "building\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert not output.exists()
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 130
        assert errors.endswith("interrupted: nothing was written\n")
        assert "Traceback" not in errors
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
