"""What the ranks of `test_ranks.py` do, where their processes find it."""

from __future__ import annotations

import time


def send_twice(connection, rank, word):
    connection.send(word * rank)
    connection.send(rank)


def fail_second(connection, rank):
    if rank == 1:
        raise ValueError
    time.sleep(60)  # as in a collective
