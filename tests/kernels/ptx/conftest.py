import pytest

from tests.kernels.ptx.launch import execute


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """In place of the interpreter: kernels are compiled for sm_90 and their PTX is executed, on CPU tensors."""
    execute(monkeypatch)
    return "cpu"
