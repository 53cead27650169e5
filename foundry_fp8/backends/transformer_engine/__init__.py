"""The Transformer Engine backend: real ``te.Linear`` modules that compute for the converted linears."""

from __future__ import annotations

from foundry_fp8.backends.transformer_engine.backend import TransformerEngineBackend

__all__ = ["TransformerEngineBackend"]
