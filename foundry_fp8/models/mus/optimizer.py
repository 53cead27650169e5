"""The optimizer's side of µnit Scaling: a learning rate for the hidden weights that falls with the square root of width."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from foundry_fp8.compat.lr_schedulers import schedulers_in
from foundry_fp8.config import ConfigError
from foundry_fp8.model_structure.names import clean_name
from foundry_fp8.model_structure.wrappers import without_ddp
from foundry_fp8.models.mus.structure import UnitScaledModel
from foundry_fp8.models.unit_scaling import KEY

__all__ = ["MARK", "check_groups", "check_schedulers", "scale_groups"]

MARK = "unit_scaling"
"""The key in a parameter group that says ``hidden`` or ``other``."""

DECOUPLED = ("DecoupledAdamW", "DecoupledLionW")
"""Weight decay of ``w *= 1 - lambda * lr / initial_lr``: the same for a group whose lr and initial_lr are scaled alike."""


MULTIPLY = tuple(
    f"{kind}LR"
    for kind in ["Step", "MultiStep", "Constant", "Linear", "Exponential", "CosineAnnealing", "Polynomial"]
)
"""Of torch's schedulers those that multiply what each group has, so that they may have been made before the split."""


def scale_groups(
    optimizer: torch.optim.Optimizer, model: nn.Module, described: UnitScaledModel, base_width: int | None
) -> float:
    """Split each parameter group into hidden weights, with ``lr * sqrt(base_width / width)``, and the rest, with ``lr``.

    Call it before a scheduler is made. Weight decay stays what it is at ``base_width``, whatever the width:
    Composer's and LLM Foundry's decoupled optimizers have it so; torch's AdamW multiplies it by the group's lr, so that the
    hidden weights' is divided by the same factor.

    Returns:
        The factor of the hidden weights' learning rate.

    Raises:
        ConfigError: No ``base_width``; another optimizer, or one whose groups are scaled already.

    Source:
        Narayan et al., arXiv 2502.05967, table 1.
    """
    if base_width is None:
        raise ConfigError(
            f"{KEY}.base_width: missing. It is the width at which optimizer.lr was found; if that is this model's, "
            f"write {described.width}."
        )
    kind = type(optimizer).__name__
    if kind == "Adam" and not any(g["weight_decay"] for g in optimizer.param_groups):
        kind = "AdamW"  # which decays otherwise
    if kind not in (*DECOUPLED, "AdamW"):
        raise ConfigError(
            f"{KEY}: the optimizer {kind} has no known rule. Use decoupled_adamw, decoupled_lionw, adamw, or Adam with "
            "weight_decay 0: learning rates transfer where neither step nor decay depends on the gradient's scale."
        )
    if any(MARK in group for group in optimizer.param_groups):
        raise ConfigError(f"{KEY}: the optimizer's groups are scaled already. Name the algorithm once.")
    factor = math.sqrt(base_width / described.width)
    hidden = {id(p) for name, p in model.named_parameters() if clean_name(name) in described.hidden}
    groups = []
    for group in optimizer.param_groups:
        for mark in ("hidden", "other"):
            params = [p for p in group["params"] if (id(p) in hidden) == (mark == "hidden")]
            if not params:
                continue
            new = {**group, "params": params, MARK: mark}
            if mark == "hidden":
                new["lr"] = group["lr"] * factor
                if "initial_lr" in group:
                    new["initial_lr"] = group["initial_lr"] * factor
                if kind == "AdamW":
                    new["weight_decay"] = group["weight_decay"] / factor
            groups.append(new)
    optimizer.param_groups[:] = groups
    return factor


def check_schedulers(
    schedulers: Iterable[Any], rates: Sequence[float], early: Sequence[str] = MULTIPLY
) -> None:
    """Whether the schedulers keep the ratio of ``rates``, which the groups began with.

    Raises:
        ConfigError: One does not: it was made for the groups before they were split, or sets rates that know no ratio.
    """

    def apart(found: Sequence[float]) -> bool:
        pairs = zip(found, rates, strict=False)
        return len(found) != len(rates) or not all(math.isclose(a * rates[0], b * found[0]) for a, b in pairs)

    for scheduler in schedulers:
        # step(0) of a SequentialLR sets its schedulers' rates.
        check_schedulers(schedulers_in(scheduler), rates, early=())
        known = [getattr(scheduler, name) for name in ("base_lrs", "max_lrs") if hasattr(scheduler, name)]
        floor = getattr(scheduler, "eta_min", 0) or any(getattr(scheduler, "min_lrs", ()))
        sets = [group["swa_lr"] for group in scheduler.optimizer.param_groups if "swa_lr" in group]
        stale = any(map(apart, known)) and not (
            type(scheduler).__name__ in early and len(known[0]) < len(rates)
        )
        if stale or floor or (sets and apart(sets)):
            raise ConfigError(
                f"{KEY}: {type(scheduler).__name__} does not keep the ratio of hidden weights' rate to the others'. Make it after "
                "apply_unit_scaling(model, optimizer, base_width=...), in place of the algorithm, with rates of each group and no "
                "absolute floor; or use Composer's schedulers."
            )


def check_groups(optimizer: torch.optim.Optimizer, model: nn.Module, described: UnitScaledModel) -> None:
    """Whether every hidden weight is where it belongs, after FSDP or whoever else rebuilt the groups.

    Raises:
        RuntimeError: One is not.
    """
    model = without_ddp(model)
    where = {id(p): group.get(MARK) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        expected = "hidden" if clean_name(name) in described.hidden else "other"
        found = where.get(id(parameter))
        if id(parameter) in where and found != expected:
            raise RuntimeError(
                f"{KEY}: {clean_name(name)} is {expected} and the optimizer has it in the group {found!r}: something rebuilt the "
                "groups after the algorithm. Under FSDP1 this needs use_orig_params: true. A checkpoint that was saved without the "
                "algorithm brings its groups along: set load_ignore_keys: [state/optimizers, state/schedulers]."
            )
    missing = described.hidden - {clean_name(name) for name, _ in model.named_parameters()}
    if missing:
        raise RuntimeError(
            f"{KEY}: {min(missing)} is no parameter of the wrapped model. Under FSDP1 set fsdp_config.use_orig_params: true."
        )
