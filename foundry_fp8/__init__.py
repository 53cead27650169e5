"""FP8 training for MosaicML Composer and LLM Foundry.

``import foundry_fp8`` needs torch alone. Composer and LLM Foundry are imported only by what plugs into them
(``foundry_fp8.algorithms``, ``.callbacks``, ``.models``, ``.cli``).
"""

from __future__ import annotations

from foundry_fp8.algorithms.fp8.functional import apply_fp8
from foundry_fp8.config import ConfigError
from foundry_fp8.surgery import SurgeryReport

__version__ = "0.1.0"

__all__ = ["ConfigError", "SurgeryReport", "__version__", "apply_fp8"]
