import pytest
import torch

from tests.kernels.interpreter import device  # noqa: F401


@pytest.fixture(autouse=True)
def _has_the_gemm(request):
    """Skip what asks a GPU for MX products that it does not have."""
    case = getattr(request.node, "callspec", None)
    asked = case is not None and "mxfp8" in case.id and torch.cuda.is_available()
    if asked and torch.cuda.get_device_capability() < (10, 0):
        pytest.skip("MXFP8 needs compute capability 10.0")
