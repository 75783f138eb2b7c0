"""Mixed traffic against a real server for minutes or hours: nothing may grow or be left behind.

.venv/models/bin/python -m m3trt.bench.soak --engine_dir out/engine --minutes 240

Starts the server itself. Text, streams, pictures, clients that hang up and wrong requests run at
once; memory, files, processes and shared memory are sampled; at the end no page may be in use, and
after SIGTERM no process and no shared-memory file may exist. A page of the cache becomes memory
when first used: build with a small `--max_seq_len`, so that all of them are early in the run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from m3trt.bench.records import append_record
from m3trt.bench.traffic import Traffic
from m3trt.serve.processes import group_members

SAMPLE_PERIOD_S = 3.0
READY_TIMEOUT_S = 300.0
GROWTH = {"memory_mb": 32, "shared_memory_mb": 8, "files": 8, "threads": 8, "processes": 0}
"""How far the last quarter's median may lie above the second's, by field of `Sample`."""


class Sample(NamedTuple):
    """What the server's processes hold; the memory is their proportional set size."""

    memory_mb: float
    shared_memory_mb: float
    files: int
    threads: int
    processes: int


class Server:
    """A supervised server in processes of its own."""

    def __init__(self, engine_dir: Path, run_dir: Path, python: Path) -> None:
        command = [str(python), "-m", "m3trt.serve", "--engine_dir", str(engine_dir)]
        command += ["--http_port", "0", "--run_dir", str(run_dir)]
        self.process = subprocess.Popen(command, stdout=sys.stderr)
        state, deadline = run_dir / "server.json", time.monotonic() + READY_TIMEOUT_S
        while not state.exists() or not state.read_text().endswith("}\n"):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.terminate()
                raise RuntimeError(f"the server did not start: see {run_dir}")
            time.sleep(0.1)
        self.info: dict[str, str] = json.loads(state.read_text())
        self.group = int(self.info["pid"])

    def sample(self) -> Sample:
        found = [_sample_process(pid) for pid in group_members(self.group)]
        memory, files, threads = (sum(part) for part in zip(*filter(None, found), strict=True))
        shared = sum(path.stat().st_size for path in self.shared_memory())
        return Sample(memory / 1e3, shared / 1e6, int(files), int(threads), len(found))

    def shared_memory(self) -> list[Path]:
        return list(Path("/dev/shm").glob(f"m3trt_{self.process.pid}_*"))

    def in_use(self) -> list[str]:
        """Metrics of the engine that should be 0 when it has nothing to do, and are not."""
        with urllib.request.urlopen(f"http://{self.info['metrics']}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        labels = ('="used"', '="active"', '="waiting"')
        found = [line for line in lines if any(label in line for label in labels)]
        if len(found) != len(labels):
            return [f"metrics {found}, expected one each of {labels}"]
        return [line for line in found if float(line.rpartition(" ")[2])]

    def stop(self) -> list[str]:
        """Ask it to end; returns what went wrong: the exit code and everything that is left."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            code = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return ["SIGTERM did not end the server within 60 s"]
        problems = [f"the server ended with {code}"] if code else []
        problems += [f"process {pid} is left" for pid in group_members(self.group)]
        return problems + [f"{path} is left" for path in self.shared_memory()]


def _sample_process(pid: int) -> tuple[float, int, int] | None:
    """(kB, open files, threads); None if it has just ended."""
    folder = Path("/proc", str(pid))
    try:
        lines = (folder / "smaps_rollup").read_text().splitlines()
        memory = next(float(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return memory, len(list((folder / "fd").iterdir())), len(list((folder / "task").iterdir()))
    except (OSError, StopIteration):
        return None


def soak(engine_dir: Path, minutes: float, python: Path) -> dict[str, Any]:
    """Run it; returns a result record whose `problems` should be empty.

    Args:
        python: the interpreter of the models' environment, which starts the server.

    Raises:
        RuntimeError: the server does not start.
    """
    run_dir = Path(tempfile.mkdtemp(prefix="m3trt-soak-"), "run")
    server = Server(engine_dir, run_dir, python)
    traffic, samples = Traffic(server.info["http"]), list[Sample]()
    start = time.monotonic()
    try:
        with traffic:
            while time.monotonic() < start + 60 * minutes and not traffic.problems:
                time.sleep(SAMPLE_PERIOD_S)
                if not group_members(server.group):
                    traffic.problems.append("the server died, and its supervisor restarted it")
                    break
                samples.append(server.sample())
                print(f"{traffic}; {samples[-1]}", file=sys.stderr)
        seconds = time.monotonic() - start
        problems = traffic.problems + _wait_until_idle(server)
    finally:
        left = server.stop()
    quarter = max(1, len(samples) // 4)
    parts = samples[quarter : 2 * quarter] or samples, samples[-quarter:]
    before, after = ([statistics.median(column) for column in zip(*p, strict=True)] for p in parts)
    problems += left + [
        f"{name} grew from {old:.0f} to {new:.0f}, at most {limit} more are allowed"
        for (name, limit), old, new in zip(GROWTH.items(), before, after, strict=True)
        if new > old + limit
    ]
    if problems:
        print(f"the server's log is in {run_dir}", file=sys.stderr)
    else:
        shutil.rmtree(run_dir.parent)
    return {
        "case": {"what": "soak", "minutes": minutes, **traffic.mix()},
        "seconds": round(seconds, 1),
        "floor_seconds": None,
        "bound": None,
        "rate": round(sum(traffic.done.values()) / seconds, 2),
        "rate_unit": "requests/s",
        "requests": dict(traffic.done),
        "second_quarter": _rounded(before),
        "last_quarter": _rounded(after),
        "problems": problems,
        "baselines": {},
        "runs": 1,
    }


def _rounded(values: Sequence[float]) -> dict[str, float]:
    return dict(zip(GROWTH, (round(value, 1) for value in values), strict=True))


def _wait_until_idle(server: Server, seconds: float = 60) -> list[str]:
    deadline = time.monotonic() + seconds
    while (busy := server.in_use()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return busy


def main(argv: Sequence[str] | None = None) -> int:
    """Soak, append the record; 1 if there are problems."""
    parser = argparse.ArgumentParser(
        prog="python -m m3trt.bench.soak",
        description="Mixed traffic against a server; record what it held at begin and end.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--engine_dir", type=Path, required=True, help="written by m3trt.build")
    parser.add_argument("--minutes", type=float, default=4.0, help="how long; 4 at least")
    arguments = parser.parse_args(argv)
    record = soak(arguments.engine_dir, arguments.minutes, Path(sys.executable))
    append_record("load_test", record, {})
    print(json.dumps(record))
    return int(bool(record["problems"]))


if __name__ == "__main__":
    sys.exit(main())
