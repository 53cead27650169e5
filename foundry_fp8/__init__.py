"""FP8 training for MosaicML Composer and LLM Foundry.

``import foundry_fp8`` needs torch alone. Composer and LLM Foundry are imported only by what plugs into them
(``foundry_fp8.algorithms``, ``.callbacks``, ``.models``, ``.cli``).
"""

__version__ = "0.1.0"
