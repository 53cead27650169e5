"""µnit Scaling: decoders whose tensors have unit variance by construction, so that FP8 needs no scales that are measured.

Source: Narayan et al., "µnit Scaling: Simple and Scalable FP8 LLM Training" (ICML 2025, arXiv 2502.05967), which published
no code; ``docs/unit_scaling.md`` says what is from there and what is not.
"""

from foundry_fp8.models.mus.config import SIZES, MusConfig, default_tau
from foundry_fp8.models.mus.modeling import MusForCausalLM, MusModel

__all__ = ["SIZES", "MusConfig", "MusForCausalLM", "MusModel", "default_tau"]
