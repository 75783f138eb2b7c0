"""Processes of ranks: what they send, and an end when one fails."""

from __future__ import annotations

import importlib
import time
from pathlib import Path

import pytest
from m3trt.bench.ranks import run_ranks

pytestmark = pytest.mark.smoke


@pytest.fixture
def work(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return importlib.import_module("rank_work")


def test_answers_of_all_ranks(work):
    assert run_ranks(2, 2, work.send_twice, "ab") == [["", "ab"], [0, 1]]


def test_a_rank_that_fails_ends_the_run(work):
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="a rank failed"):
        run_ranks(2, 1, work.fail_second)
    assert time.monotonic() - start < 30
