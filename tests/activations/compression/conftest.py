from tests.activations.checkpointing.conftest import make_llama  # noqa: F401
