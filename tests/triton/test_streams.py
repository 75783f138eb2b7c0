"""Streams outlive their end by a while, and no longer."""

from __future__ import annotations

import time
import weakref

import pytest
from m3trt.serve.streams import EndedStreams

pytestmark = pytest.mark.smoke


class Stream:
    """Stands for Triton's iterator of responses."""


def test_a_stream_lives_until_the_first_one_after_its_time() -> None:
    ended, alive = EndedStreams(seconds=0.05), weakref.WeakSet[Stream]()
    for _ in range(3):
        stream = Stream()
        alive.add(stream)
        ended.keep(stream)
    del stream
    assert len(alive) == 3
    time.sleep(0.1)
    assert len(alive) == 3
    ended.keep(Stream())
    assert len(alive) == 0


def test_close_drops_all() -> None:
    ended, stream = EndedStreams(seconds=0.05), Stream()
    alive = weakref.WeakSet([stream])
    ended.keep(stream)
    del stream
    ended.close()
    ended.close()
    assert len(alive) == 0
