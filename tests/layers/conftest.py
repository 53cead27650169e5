from tests.kernels.interpreter import device  # noqa: F401
