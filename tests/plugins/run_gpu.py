"""Runs the GPU tests of plugins and engines where a GPU and pytest are; fails when nothing ran.

python tests/plugins/run_gpu.py [pytest arguments]
"""

from __future__ import annotations

import sys
from pathlib import Path

import plugin_harness as harness
import pytest


class Counter:
    """Counts what really ran: a run in which everything was skipped is no success."""

    passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed


def main(arguments: list[str]) -> int:
    if reason := harness.gpu_missing():
        print(f"cannot run: {reason}", file=sys.stderr)
        return 2
    counter = Counter()
    plugins = Path(__file__).resolve().parent
    folders = [str(plugins), str(plugins.parent / "parity")]
    status = int(pytest.main([*folders, "-m", "gpu", "-q", *arguments], plugins=[counter]))
    print(f"{counter.passed} GPU tests passed")
    return status or (0 if counter.passed else 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
