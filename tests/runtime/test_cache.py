"""Pages are given out once, come back once, and none is lost."""

from __future__ import annotations

import numpy as np
import pytest
from m3trt.runtime.cache import CacheError, PagePool

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(
    ("tokens", "pages"), [(1, 1), (127, 1), (128, 1), (129, 2), (256, 2), (257, 3)]
)
def test_pages_for(tokens: int, pages: int) -> None:
    pool = PagePool(4, 128)
    assert pool.pages_for(tokens) == pages
    assert pool.allocate("a", tokens).size == pages
    assert (pool.free, pool.used) == (4 - pages, pages)


def test_all_pages_can_be_used() -> None:
    pool = PagePool(3, 4)
    assert pool.fits(12)
    assert not pool.fits(13)
    table = pool.allocate("a", 12)
    assert sorted(table.tolist()) == [0, 1, 2]
    assert table.dtype == np.int32
    assert not pool.fits(1)
    pool.release("a")
    assert pool.fits(12)


def test_wrong_use_is_an_error() -> None:
    pool = PagePool(2, 4)
    pool.allocate("a", 4)
    with pytest.raises(CacheError, match="'a' has pages already"):
        pool.allocate("a", 4)
    with pytest.raises(CacheError, match="needs 2 pages, 1 of 2 are free"):
        pool.allocate("b", 8)
    pool.release("a")
    with pytest.raises(CacheError, match="released twice"):
        pool.release("a")
    with pytest.raises(ValueError, match="0 pages"):
        PagePool(0, 4)
    pool.check()


def test_check_finds_a_lost_page() -> None:
    pool = PagePool(3, 4)
    pool.allocate("a", 4)
    pool._free.pop()
    with pytest.raises(CacheError, match="1 owned and 1 free pages do not add up to 3"):
        pool.check()


def test_random_traffic() -> None:
    rng = np.random.default_rng(0)
    pool, owned = PagePool(16, 4), dict[str, set[int]]()
    for step in range(2000):
        tokens = int(rng.integers(1, 24))
        if owned and (rng.random() < 0.5 or not pool.fits(tokens)):
            name = str(rng.choice(list(owned)))
            pool.release(name)
            del owned[name]
        elif pool.fits(tokens):
            pages = set(pool.allocate(str(step), tokens).tolist())
            assert len(pages) == pool.pages_for(tokens)
            assert all(pages.isdisjoint(other) for other in owned.values())
            owned[str(step)] = pages
        assert pool.used == sum(map(len, owned.values()))
        pool.check()
