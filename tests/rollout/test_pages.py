"""Pages: never two owners unless shared, never lost, never handed out while somebody holds them."""

from __future__ import annotations

import pytest

from rollout.pages import PageAllocator


def test_the_scratch_page_is_never_handed_out():
    pages = PageAllocator(5)
    assert sorted(pages.take(4)) == [1, 2, 3, 4]
    assert pages.num_free == 0


def test_a_shared_page_is_free_only_when_its_last_owner_lets_go():
    pages = PageAllocator(3)
    [page] = pages.take(1)
    pages.share([page])
    pages.release([page])
    assert pages.num_free == 1
    pages.release([page])
    assert pages.num_free == 2


def test_misuse_is_an_error():
    pages = PageAllocator(3)
    with pytest.raises(RuntimeError, match="3 pages asked for, 2 free of 2"):
        pages.take(3)
    with pytest.raises(RuntimeError, match="page 1 is free"):
        pages.share([1])
    [page] = pages.take(1)
    pages.release([page])
    with pytest.raises(RuntimeError, match=f"page {page} is released twice"):
        pages.release([page])
