"""What Triton's interpreter lacks with the numpy of today."""

from typing import Any

import pytest

__all__ = ["loops_to_loaded_numbers"]


@pytest.fixture(autouse=True)
def loops_to_loaded_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 makes an int of an array of one number, which numpy no longer does."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
