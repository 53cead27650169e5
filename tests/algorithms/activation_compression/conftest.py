from tests.algorithms.activation_checkpointing.conftest import make_llama  # noqa: F401
