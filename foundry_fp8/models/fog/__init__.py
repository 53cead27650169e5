"""FOG: decoders whose every block GEMM, attention's included, trains in FP8; and the baselines they are compared with.

Source: the first author's NeurIPS 2025 poster, arXiv 2505.20524 and the release anonymous4375934/FOG; ``docs/fog.md``
says which detail is from where, and which is not confirmed.
"""

from foundry_fp8.models.fog.config import SIZES, VARIANTS, Architecture, FogConfig
from foundry_fp8.models.fog.modeling import FogForCausalLM, FogModel

__all__ = ["SIZES", "VARIANTS", "Architecture", "FogConfig", "FogForCausalLM", "FogModel"]
