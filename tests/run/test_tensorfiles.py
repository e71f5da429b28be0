"""What is written is what `torch.load` reads, wherever the tensors are, and no thread stands still for it."""

from __future__ import annotations

import errno
import gc
import resource
import weakref
from pathlib import Path

import pytest
import torch

from run import tensorfiles
from tests.support.builders import mapped_files

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="copies from a GPU")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def device(request, monkeypatch):
    """Where tensors go the way of the GPU's; here those of the host that a test made before it saved them."""
    if request.param == "cpu":
        monkeypatch.setattr(tensorfiles, "_elsewhere", lambda tensor: True)
    for name in ("cpu", "copy_"):  # these keep the interpreter's lock to their end
        monkeypatch.setattr(torch.UntypedStorage, name, lambda *_: pytest.fail("a whole storage is copied"))
    monkeypatch.setattr(tensorfiles, "PIECE", 48)
    monkeypatch.setattr(tensorfiles, "SEGMENT", 64)
    monkeypatch.setattr(tensorfiles, "ALONE", 8)
    return request.param


def state_of(device: str) -> dict:
    flat = torch.arange(1000.0, device=device)
    return {
        "views": [flat[3:10], flat[500:].view(50, 10).T],
        "gradient": torch.ones(5, device=device, requires_grad=True),
        "bf16": torch.randn(7, 11, device=device).bfloat16(),
        "nothing": torch.empty(0, device=device),
        "number": torch.tensor(7, device=device),
        "parameter": torch.nn.Parameter(torch.randn(3, device=device)),
        "step": 3,
    }


def test_tensors_come_back_as_they_were(tmp_path, device):
    state = state_of(device)
    tensorfiles.save(state, tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", weights_only=False)
    assert loaded["step"] == 3 and type(loaded["parameter"]) is torch.nn.Parameter
    for name in ("gradient", "bf16", "nothing", "number", "parameter"):
        assert torch.equal(loaded[name], state[name].cpu()), name
        assert loaded[name].dtype == state[name].dtype and loaded[name].requires_grad == state[name].requires_grad
    for got, expected in zip(loaded["views"], state["views"], strict=True):
        assert torch.equal(got, expected.cpu()) and got.stride() == expected.stride()
    assert len({view.untyped_storage().data_ptr() for view in loaded["views"]}) == 1  # written once


def test_what_is_loaded_is_the_file_itself_until_nobody_holds_it(tmp_path):
    path = tmp_path / "file.pt"
    tensorfiles.save({"x": torch.arange(1 << 16)}, path)
    loaded = tensorfiles.load(path)
    assert torch.equal(loaded["x"], torch.arange(1 << 16)) and str(path) in mapped_files()
    loaded["x"].zero_()  # whoever writes there has pages of his own
    assert torch.equal(tensorfiles.load(path)["x"], torch.arange(1 << 16))
    del loaded
    assert str(path) not in mapped_files()


def test_the_checksum_is_that_of_the_file(tmp_path, device):
    path = tmp_path / "file.pt"
    assert tensorfiles.save(state_of(device), path) == tensorfiles.checksum(path)


def test_a_file_is_the_same_whether_its_tensors_are_the_hosts(tmp_path, device, monkeypatch):
    state = state_of("cpu")
    first = tensorfiles.save(state, tmp_path / "first.pt")
    monkeypatch.setattr(tensorfiles, "_elsewhere", lambda tensor: False)
    assert tensorfiles.save(state, tmp_path / "second.pt") == first


def test_a_full_disk_is_the_systems_own_error(device):
    with pytest.raises(OSError, match="No space left") as error:
        tensorfiles.save(state_of(device), Path("/dev/full"))
    assert error.value.errno == errno.ENOSPC


@pytest.mark.parametrize("room", [10, 1500, 4000])
def test_so_is_that_of_a_disk_that_fills_up_on_the_way(tmp_path, device, room):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            tensorfiles.save(state_of(device), tmp_path / "file.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_tensors_that_were_made_to_be_saved_are_gone_afterwards(tmp_path, device):
    tensor = torch.ones(30, device=device)
    held = weakref.ref(tensor.untyped_storage())
    gc.disable()
    try:
        tensorfiles.save({"made": tensor}, tmp_path / "file.pt")
        assert held() is not None
        del tensor
        assert held() is None
    finally:
        gc.enable()


def test_a_storage_written_in_parts_is_refused_before_a_stand_in_is_read(tmp_path, device):
    with tensorfiles._TensorFile(tmp_path / "file.pt") as file:
        stand_in = file._stand_in(torch.arange(100, dtype=torch.uint8, device=device)).numpy()
        with pytest.raises(RuntimeError, match="wrote 40 bytes of a storage of 100 at once"):
            file.write(stand_in[:40].data)


def test_a_file_with_the_copy_of_a_stand_in_has_no_checksum(tmp_path, device):
    """As a release of torch would make whose writer is given bytes: a file of nothing, and a checksum that fits it."""
    with tensorfiles._TensorFile(tmp_path / "file.pt") as file:
        file.write(file._stand_in(torch.arange(100, dtype=torch.uint8, device=device)).numpy().tobytes())
        with pytest.raises(RuntimeError, match="copies of 1 storages"):
            file.checksum()


def test_copies_on_the_host_keep_tied_names_tied(device):
    tied = torch.randn(40, 3, device=device)
    state = {"embed": tied, "head": tied.view(40, 3), "norm": torch.randn(3, device=device), "part": tied[1:]}
    state |= {"every": tied.view(-1)[::7], "bits": tied.view(torch.int32)}
    with tensorfiles.host_copies(state) as copies:
        assert list(copies) == list(state)
        assert copies["embed"] is copies["head"] and copies["embed"] is not tied
        assert all(torch.equal(copies[name], tensor.cpu()) for name, tensor in state.items())
        assert all(copies[name].dtype == tensor.dtype for name, tensor in state.items())
        assert len({copy.untyped_storage().data_ptr() for copy in copies.values()}) == 5
