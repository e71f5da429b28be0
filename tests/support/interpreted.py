"""Importing this lets the Triton kernels run on CPU, in Triton's interpreter; with a GPU it changes nothing.

`conftest.py` has asked for the interpreter before triton was first imported. Without triton the importing test module
is skipped.
"""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="triton is not installed; the kernels have no other implementation to test")

from triton.runtime import interpreter  # noqa: E402

if DEVICE == "cpu":
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_for_numpy(tensor, scope):
        """triton 3.6 holds scalars as one-element arrays and calls int() on them, which numpy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_for_numpy
