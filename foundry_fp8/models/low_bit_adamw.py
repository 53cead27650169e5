"""``optimizer: {name: adamw_8bit, ...}`` and ``adamw_fp8``: AdamW with its two moments in 8 bits, torchao's.

The moments of a parameter take 2 bytes an element instead of 8. Each parameter's part on this rank is quantised in blocks of
``block_size`` elements with a float32 scale each: as codes of a table (Dettmers et al., arXiv:2110.02861) or as E4M3. What has fewer than
4096 elements, or a number that ``block_size`` does not divide, keeps float32 moments; the log says how much that is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from foundry_fp8.compat.fsdp1 import is_flattened

try:
    from torchao import optim as torchao_optim
except ImportError as error:
    raise ImportError(
        "optimizer.name: adamw_8bit and adamw_fp8 are torchao's optimizers. pip install 'foundry-fp8[torchao]'."
    ) from error

__all__ = ["AdamW8bit", "AdamWFp8"]

log = logging.getLogger(__name__)
EXPECTED = 0.9
"""Share of the moments' elements below which the log warns: matrices are in 8 bits, norms and biases are not."""


class _LowBitAdamW(torch.optim.Optimizer):
    """What a run asks of torchao's optimizers and they do not say."""

    block_size: int
    _steps = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; the first checks the parameters, the second logs what share of the moments is in 8 bits (a planner's probe steps once).

        Raises:
            RuntimeError: The parameters are FSDP1's, whose checkpoints gather moments as plain tensors and would fail.
        """
        if self._steps == 0 and any(is_flattened(p) for group in self.param_groups for p in group["params"]):
            raise RuntimeError(
                f"optimizer.name: torchao's {type(self).__name__} cannot be saved under FSDP1. Train under FSDP2 (FSDP_VERSION=2) or "
                "DDP, or take an optimizer in float32."
            )
        if self._steps == 1:
            self._tell()
        self._steps += 1
        return super().step(closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load.

        Raises:
            RuntimeError: The moments were saved in blocks of another size, in which they would go on.
        """
        super().load_state_dict(state_dict)
        for value in (value for state in self.state.values() for value in state.values()):
            local: Any = value.to_local() if isinstance(value, DTensor) else value
            found = local.block_size if hasattr(local, "codes") else self.block_size
            if found != self.block_size:
                raise RuntimeError(
                    f"optimizer.block_size: the checkpoint's moments are in blocks of {found}, this run says {self.block_size}. "
                    f"Set it to {found}, or begin with fresh moments: load_ignore_keys: [state/optimizers]."
                )

    @torch.no_grad()
    def _tell(self) -> None:
        moments = [
            value.to_local() if isinstance(value, DTensor) else value
            for state in self.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.dim()
        ]
        everything = sum(moment.numel() for moment in moments)
        share = sum(moment.numel() for moment in moments if hasattr(moment, "codes")) / max(everything, 1)
        log.log(
            logging.INFO if share >= EXPECTED else logging.WARNING,
            "%s: %.1f %% of the moments' elements are in 8 bits, the rest in float32 (fewer than 4096 elements of a parameter on "
            "this rank, or a number that %d does not divide)",
            type(self).__name__,
            100 * share,
            self.block_size,
        )


class AdamW8bit(_LowBitAdamW, torchao_optim.AdamW8bit):  # type: ignore[misc]
    """Moments as 8-bit codes of a table; the arguments are those of ``torchao.optim.AdamW8bit``."""


class AdamWFp8(_LowBitAdamW, torchao_optim.AdamWFp8):  # type: ignore[misc]
    """Moments as E4M3; the arguments are those of ``torchao.optim.AdamWFp8``. A GPU needs compute capability 8.9 or more."""
