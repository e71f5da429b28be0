"""Device memory that can be given back and taken again at the same address, by CUDA's virtual memory interface.

Captured graphs hold addresses. So a range of addresses is reserved for good, and only what lies behind it comes and
goes: between rollouts the update can have the key/value cache's memory, and the graphs stay valid. Contents are lost
and come back as zeros. The driver is called through ctypes, since torch offers no such call; whoever releases must
make sure that nothing on the device still uses the memory (`release` waits for the device).
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from startup.forecast import OutOfMemory

_PINNED, _DEVICE, _READ_WRITE, _OUT_OF_MEMORY = 1, 1, 3, 2  # cuda.h


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Array:
    """What torch needs to see foreign device memory as a tensor."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3,
        }  # fmt: skip


class ReleasableMemory:
    """`tensor`: uint8 [size], zeros. It must not be touched between `release` and `restore`."""

    def __init__(self, size: int, device: torch.device):
        torch.cuda.synchronize(device)  # there is a context now
        self._device = device
        self._driver: Any = ctypes.CDLL("libcuda.so.1")
        location = _Location(_DEVICE, torch.cuda.current_device() if device.index is None else device.index)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)
        step = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(self._properties), 0)
        self._size = ctypes.c_size_t(-(-size // step.value) * step.value)
        self._address, self._handle = ctypes.c_uint64(), ctypes.c_uint64()
        zero = ctypes.c_size_t(0)
        self._call("cuMemAddressReserve", ctypes.byref(self._address), self._size, zero, ctypes.c_uint64(0), zero)
        self.resident = False
        self._map()
        self.tensor: Tensor = torch.as_tensor(_Array(self._address.value, size), device=device)
        self.tensor.zero_()

    def release(self) -> None:
        """Gives the memory back to the device; does nothing where it is given back."""
        if self.resident:
            torch.cuda.synchronize(self._device)
            self._call("cuMemUnmap", self._address, self._size)
            self._call("cuMemRelease", self._handle)
            self.resident = False

    def restore(self) -> None:
        """Takes memory again, at the same address, all zeros; does nothing where it is there.

        Raises OutOfMemory where too little is free.
        """
        if not self.resident:
            torch.cuda.empty_cache()  # what torch keeps of the update's memory
            self._map()
            self.tensor.zero_()

    def _map(self) -> None:
        self._call("cuMemCreate", ctypes.byref(self._handle), self._size, ctypes.byref(self._properties), _NO_FLAGS)
        self._call("cuMemMap", self._address, self._size, ctypes.c_size_t(0), self._handle, _NO_FLAGS)
        self._call("cuMemSetAccess", self._address, self._size, ctypes.byref(self._access), ctypes.c_size_t(1))
        self.resident = True

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status == _OUT_OF_MEMORY:
            free, _ = torch.cuda.mem_get_info(self._device)
            raise OutOfMemory(
                f"{self._size.value / 1e9:.1f} GB of KV cache do not fit beside what else lies on the GPU, where "
                f"{free / 1e9:.1f} GB are free; lower rollout.kv_memory_fraction or set rollout.kv_tokens"
            )
        if status:
            raise RuntimeError(f"{name} failed with CUDA driver status {status}")


_NO_FLAGS = ctypes.c_ulonglong(0)
