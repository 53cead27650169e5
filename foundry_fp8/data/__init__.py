"""Training data for the demo: a corpus that every machine has, a tokenizer trained on it, and MDS shards of it.

``foundry_fp8.data.tokenizer`` is imported only when data is made: transformers and streaming take seconds to import.
"""

from foundry_fp8.data.shards import PreparedData, prepare_data

__all__ = ["PreparedData", "prepare_data"]
