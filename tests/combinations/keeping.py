"""Whether activation compression packs what it is said to pack, judged by what its targets are handed and hand on."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from foundry_fp8.activations.compression.apply import CompressionReport
from foundry_fp8.activations.compression.saved import MARK, Compressor
from tests.combinations.wrapping import clean

MIN_NUMEL = 256


@dataclasses.dataclass
class Watched:
    """One target that packs.

    A checkpoint keeps those of its inputs that need a gradient: none behind frozen weights alone, where nothing is left to
    pack, whatever its policy (outputs that a policy keeps are the checkpoint's own). Any other module keeps something as soon
    as what it returns needs a gradient, or its fused forms do, which pack for themselves.
    """

    compressor: Compressor
    fused: bool
    needs: bool = False

    def look(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A forward hook."""
        kept = (args, kwargs) if self.compressor.boundary else output
        self.needs |= any(
            isinstance(x, Tensor) and x.requires_grad and x.numel() >= MIN_NUMEL for x in tree_leaves(kept)
        )

    @property
    def right(self) -> bool:
        """Whether something was packed, or left out as backward makes it again (a fused norm's output), exactly where it was needed."""
        saved = self.compressor.saved
        return (saved.packed + saved.left_out > 0) == self.needs or (self.fused and self.needs)


def watch(model: nn.Module, report: CompressionReport) -> list[Watched]:
    """Every target of ``model`` that packs, from now on."""
    fused = [name for name, how, _ in report.rows if how.startswith("fused")]
    found = []
    for name, module in model.named_modules():
        compressor = vars(module).get(MARK)
        if compressor is not None and compressor.fmt is not None:
            inside = any(form.startswith(f"{clean(name)}.") for form in fused)
            found.append(Watched(compressor, inside))
            module.register_forward_hook(found[-1].look, with_kwargs=True)
    return found
