"""Learning rates that transfer over width: the functional form of the algorithm ``unit_scaling``."""

from __future__ import annotations

import torch
from torch import nn

from foundry_fp8.compat.lr_schedulers import has_scheduler
from foundry_fp8.config import ConfigError
from foundry_fp8.models.mus.optimizer import scale_groups
from foundry_fp8.models.mus.structure import initialise_mpt_head, unit_scaled
from foundry_fp8.models.unit_scaling import KEY

__all__ = ["apply_unit_scaling"]


def apply_unit_scaling(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, base_width: int | None
) -> float:
    """Give the hidden weights of a µnit-scaled model the learning rate ``lr * sqrt(base_width / width)``.

    Call it before a scheduler is made and before the model is wrapped. An MPT head that LLM Foundry left at torch's default
    is drawn from N(0, 1).

    Args:
        model: MPT of µnit-scaled parts, or :class:`~foundry_fp8.models.mus.MusForCausalLM`.
        optimizer: DecoupledAdamW, DecoupledLionW, torch's AdamW or Adam without weight decay, of ``model``'s parameters; its groups are split in place.
        base_width: The width at which its learning rate was found; required.

    Returns:
        The factor of the hidden weights' learning rate.

    Raises:
        ConfigError: The model is not µnit-scaled, or only in part; no ``base_width``; an optimizer without a known rule or with a scheduler.
    """
    if has_scheduler(optimizer):
        raise ConfigError(
            f"{KEY}: a scheduler was made for the optimizer already, and does not know the groups that are made here. Make it afterwards."
        )
    described = unit_scaled(model)
    initialise_mpt_head(model)
    return scale_groups(optimizer, model, described, base_width)
