"""Who owns which KV page: a free list with reference counts. Integers only."""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """Pages 1 .. num_pages - 1; page 0 is scratch and is never handed out.

    A page may have several owners (the prompt of a group is shared); it is free again when the last lets go.
    """

    def __init__(self, num_pages: int):
        self._free = list(range(num_pages - 1, 0, -1))
        self._owners = [0] * num_pages
        self.capacity = num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Raises RuntimeError when fewer than `count` pages are free; ask `num_free` first."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages asked for, {len(self._free)} free of {self.capacity}")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            if not self._owners[page]:
                raise RuntimeError(f"page {page} is free and cannot be shared")
            self._owners[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            if not self._owners[page]:
                raise RuntimeError(f"page {page} is released twice")
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)
