"""What the scheduler puts into a step, without a thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from m3trt.runtime.cache import PagePool
from m3trt.runtime.request import RequestError
from m3trt.runtime.scheduler import Scheduler, Step
from m3trt.runtime.sequence import Sequence

pytestmark = pytest.mark.smoke


class Driver:
    """A scheduler driven by hand, on the fake executor."""

    def __init__(self, kit: Any, num_pages: int = 64, **limits: int) -> None:
        self.kit = kit
        self.limits = kit.limits(**limits)
        self.pool = PagePool(num_pages, self.limits.tokens_per_block)
        self.scheduler = Scheduler(self.limits, self.pool)
        self.executor = kit.FakeExecutor(self.limits, num_pages)

    def add(self, request_id: str, prompt: Any, max_tokens: int = 8, table: Any = None) -> Sequence:
        prompt = np.ones(prompt, np.int32) if isinstance(prompt, int) else np.array(prompt)
        request = self.kit.request(
            request_id, input_ids=prompt, max_tokens=max_tokens, prompt_embedding_table=table
        )
        self.scheduler.check_fits(request)
        receiver = self.kit.Receiver()
        sequence = Sequence(request, self.kit.VOCAB, self.kit.token_bytes, receiver)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Step:
        step = self.scheduler.plan()
        assert step is not None
        logits = self.executor.step(step.inputs)
        asking = [chunk.sequence for chunk in step.chunks if chunk.wants_logits]
        self.scheduler.commit(step)
        for sequence, row in zip(asking, logits, strict=True):
            output = sequence.append(row)
            if output is not None and output.final:
                self.scheduler.remove(sequence)
        return step


def shape(step: Step) -> list[tuple[str, int]]:
    return [(chunk.sequence.request.request_id, chunk.count) for chunk in step.chunks]


def test_nothing_to_do(kit: Any) -> None:
    assert Driver(kit).scheduler.plan() is None


def test_chunks_fill_the_step_oldest_first(kit: Any) -> None:
    driver = Driver(kit)
    driver.add("a", 20)
    driver.add("b", 10)
    first, second, third = driver.step(), driver.step(), driver.step()
    assert shape(first) == [("a", 16)]
    assert first.inputs.logit_rows.size == 0
    assert first.inputs.decode_shape == (0, 1)
    assert shape(second) == [("a", 4), ("b", 10)]
    assert second.inputs.logit_rows.tolist() == [3, 13]
    assert second.context_tokens == 14
    assert shape(third) == [("a", 1), ("b", 1)]
    assert third.inputs.decode_shape == (2, 1)
    assert third.inputs.sequence_length.tolist() == [21, 11]


def test_context_comes_first_and_decodes_always_run(kit: Any) -> None:
    driver = Driver(kit)
    driver.add("a", 3)
    driver.step()
    driver.add("b", 40)
    steps = [driver.step() for _ in range(4)]
    assert [shape(step) for step in steps[:3]] == [
        [("b", 15), ("a", 1)],
        [("b", 15), ("a", 1)],
        [("b", 10), ("a", 1)],
    ]
    assert [step.inputs.logit_rows.tolist() for step in steps[:3]] == [[15], [15], [9, 10]]
    assert shape(steps[3]) == [("a", 1), ("b", 1)]
    assert steps[0].inputs.cu_query_lens.tolist() == [0, 15, 16]
    assert steps[1].inputs.position_ids.tolist() == [*range(15, 30), 4]


def test_a_prompt_of_one_token_is_context(kit: Any) -> None:
    driver = Driver(kit)
    driver.add("a", 1)
    assert driver.step().inputs.decode_shape == (0, 1)
    assert driver.step().inputs.decode_shape == (1, 1)


def test_admission_waits_for_a_slot_in_order(kit: Any) -> None:
    driver = Driver(kit, max_batch_size=2, max_num_tokens=8)
    for name in "abc":
        driver.add(name, 2, max_tokens=2)
    assert shape(driver.step()) == [("a", 2), ("b", 2)]
    assert shape(driver.step()) == [("a", 1), ("b", 1)]
    assert shape(driver.step()) == [("c", 2)]


def test_admission_reserves_pages_for_all_tokens_and_nobody_overtakes(kit: Any) -> None:
    driver = Driver(kit, num_pages=5)
    driver.add("a", 2, max_tokens=11)  # 12 cached tokens: 3 pages
    driver.add("b", 2, max_tokens=12)  # 13: 4 pages, must wait
    driver.add("c", 2, max_tokens=2)  # 1 page would fit
    assert shape(driver.step()) == [("a", 2)]
    assert driver.pool.used == 3
    for _ in range(10):
        assert shape(driver.step()) == [("a", 1)]
    assert driver.pool.used == 0
    assert shape(driver.step()) == [("b", 2), ("c", 2)]


def test_request_larger_than_the_cache(kit: Any) -> None:
    driver = Driver(kit, num_pages=3)
    driver.add("fits", 4, max_tokens=9)
    with pytest.raises(RequestError, match=r"needs 4 cache pages .* may be at most 9"):
        driver.add("large", 4, max_tokens=10)
    with pytest.raises(RequestError, match="shorten the prompt"):
        driver.add("larger", 13, max_tokens=1)
    driver.add("last", 12, max_tokens=1)


def test_remove_waiting_and_active(kit: Any) -> None:
    driver = Driver(kit, max_batch_size=1)
    active, waiting = driver.add("a", 30), driver.add("b", 3)
    driver.step()
    driver.scheduler.remove(waiting)
    assert driver.pool.used > 0
    driver.scheduler.remove(active)
    assert driver.pool.used == 0
    assert driver.scheduler.idle


def test_image_rows_are_gathered_and_renumbered(kit: Any) -> None:
    driver = Driver(kit)
    v = kit.VOCAB
    tables = [np.arange(n * 3, dtype=np.float32).reshape(n, 3) + 100 * n for n in (4, 2)]
    driver.add("a", [1, v, v + 1, v + 2, v + 3, 2], table=tables[0])
    driver.add("text", [5, 6])
    driver.add("b", [v + 1, 3, v, v], table=tables[1])
    inputs = driver.step().inputs
    ids = [1, v, v + 1, v + 2, v + 3, 2, 5, 6, v + 4, 3, v + 5, v + 6]
    assert inputs.input_ids.tolist() == ids
    expected = np.concatenate([tables[0], tables[1][[1, 0, 0]]])
    assert (inputs.prompt_embedding_table == expected).all()


def test_text_steps_carry_one_row(kit: Any) -> None:
    driver = Driver(kit)
    driver.add("a", 3)
    table = driver.step().inputs.prompt_embedding_table
    assert table.shape == (1, kit.HIDDEN)
    assert not table.any()


def test_image_rows_of_a_step_are_limited(kit: Any) -> None:
    driver = Driver(kit, max_prompt_rows=2)
    v = kit.VOCAB
    table = np.ones((3, 3), np.float32)
    driver.add("a", [1, v, v + 1, v + 2, 2], table=table)
    driver.add("b", [v, v + 1, v + 2], table=table)
    driver.add("c", [7, 8])
    assert [shape(driver.step()) for _ in range(3)] == [
        [("a", 3), ("c", 2)],
        [("a", 2), ("b", 1), ("c", 1)],
        [("b", 2), ("a", 1), ("c", 1)],
    ]


def test_page_tables_are_padded_with_minus_one(kit: Any) -> None:
    driver = Driver(kit)
    driver.add("a", 2, max_tokens=11)
    driver.add("b", 2, max_tokens=2)
    assert driver.step().inputs.kv_cache_block_offsets.tolist() == [[0, 1, 2], [3, -1, -1]]


@pytest.mark.parametrize("max_num_tokens", [1, 2, 3, 5, 7, 16, 64])
def test_any_chunk_size_gives_the_same_tokens(kit: Any, max_num_tokens: int) -> None:
    driver = Driver(kit, max_batch_size=1, max_num_tokens=max_num_tokens)
    prompt = np.arange(23) % kit.VOCAB
    sequence = driver.add("a", prompt, max_tokens=9)
    while not driver.scheduler.idle:
        driver.step()
    assert sequence.num_generated == 9
    request = kit.request(input_ids=prompt, max_tokens=9)
    fed_back = [int(s.input_ids[0]) for s in driver.executor.steps if s.decode_shape[0]]
    assert fed_back == kit.naive(request)[0][:-1]
    assert len(driver.executor.steps) == -(-23 // max_num_tokens) + 8
