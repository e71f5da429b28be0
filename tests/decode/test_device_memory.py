"""Memory comes and goes behind one range of addresses: the calls to the driver (anywhere), the memory itself (GPU)."""

from __future__ import annotations

import ctypes

import pytest
import torch

from config import UserError
from decode import device_memory
from decode.device_memory import ReleasableMemory

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
STEP, ADDRESS = 2 << 20, 0x7F0000000000


class Driver:
    """Keeps the driver's books; `free` bytes can be had."""

    def __init__(self, free: int = 4 * STEP):
        self.free, self.mapped, self.held, self.calls = free, {}, {}, []

    def __getattr__(self, name: str):
        def call(*arguments):
            self.calls.append(name)
            return getattr(self, f"_{name}")(*(getattr(a, "_obj", a) for a in arguments)) or 0

        return call

    def _cuMemGetAllocationGranularity(self, step, properties, option):
        assert (properties.type, properties.location.type, properties.location.id) == (1, 1, 3)
        step.value = STEP

    def _cuMemAddressReserve(self, address, size, alignment, wanted, flags):
        address.value = ADDRESS

    def _cuMemCreate(self, handle, size, properties, flags):
        if size.value > self.free:
            return 2
        self.free -= size.value
        handle.value = len(self.calls)
        self.held[handle.value] = size.value

    def _cuMemMap(self, address, size, offset, handle, flags):
        assert address.value not in self.mapped
        self.mapped[address.value] = handle.value

    def _cuMemSetAccess(self, address, size, access, count):
        assert (access.location.id, access.flags, count.value) == (3, 3, 1) and address.value in self.mapped

    def _cuMemUnmap(self, address, size):
        self.mapped.pop(address.value)

    def _cuMemRelease(self, handle):
        assert handle.value not in self.mapped.values()
        self.free += self.held.pop(handle.value)


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    for name in ("empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (made.free, 0))
    monkeypatch.setattr(device_memory.torch, "as_tensor", lambda array, device: torch.ones(5))
    return made


def test_memory_returns_to_the_address_it_had_and_is_free_in_between(driver):
    memory = ReleasableMemory(STEP + 1, torch.device("cuda", 3))
    assert driver.free == 2 * STEP and list(driver.mapped) == [ADDRESS]
    for _ in range(2):
        memory.release()
        memory.release()
        assert driver.free == 4 * STEP and not driver.mapped
        memory.tensor.fill_(7)  # what another may have left there
        memory.restore()
        memory.restore()
        assert driver.free == 2 * STEP and list(driver.mapped) == [ADDRESS]
        assert not memory.tensor.any(), "it comes back as zeros"
    assert driver.calls.count("cuMemAddressReserve") == 1


def test_memory_that_the_update_did_not_leave_is_named_with_the_mend(driver):
    memory = ReleasableMemory(STEP, torch.device("cuda", 3))
    memory.release()
    driver.free = STEP - 1
    with pytest.raises(UserError, match=r"do not fit .*; lower rollout\.kv_memory_fraction") as raised:
        memory.restore()
    assert not memory.resident and raised.value.of_one_rank


@gpu
def test_the_device_gets_the_memory_and_gives_it_back_as_zeros_at_the_same_address():
    size = 256 << 20
    memory = ReleasableMemory(size, torch.device("cuda"))
    address, before = memory.tensor.data_ptr(), torch.cuda.mem_get_info()[0]
    memory.tensor.fill_(3)
    memory.release()
    assert torch.cuda.mem_get_info()[0] - before >= size
    other = torch.full((size,), 5, dtype=torch.uint8, device="cuda")
    del other
    memory.restore()
    assert memory.tensor.data_ptr() == address
    assert int(memory.tensor.view(torch.int64).abs().sum()) == 0
    assert torch.cuda.mem_get_info()[0] <= before
