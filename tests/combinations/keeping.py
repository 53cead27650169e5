"""Whether activation compression packs what it is said to pack, judged by what its targets are handed and hand on."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from foundry_fp8.activations.compression.apply import CompressionReport
from foundry_fp8.activations.compression.saved import MARK, Compressor, SavedBytes
from foundry_fp8.layers.attention import FP8DotProductAttention
from foundry_fp8.layers.linear import FP8Linear
from tests.combinations.wrapping import clean

MIN_NUMEL = 256


@dataclasses.dataclass
class Watched:
    """One target that packs, over one step.

    A checkpoint keeps those of its inputs that need a gradient, all of them: none behind frozen weights alone, where nothing is left
    to pack, whatever its policy (outputs that a policy keeps are the checkpoint's own). Any other module keeps nothing unless what it
    returns needs a gradient, and something as soon as a module within that keeps what it works on, and is in no other's hands,
    returns what needs one. Of its linears that train it keeps every input, which one tensor may be for several. The shapes of a step
    are those of the one before, and so is what is kept.
    """

    name: str
    compressor: Compressor
    may: bool = False
    must: bool = False
    least: int = 0
    """Bytes."""
    before: int | None = None
    wrong: list[str] = dataclasses.field(default_factory=list)
    _inputs: set[tuple[int, ...]] = dataclasses.field(default_factory=set)

    def handed(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A forward hook of the target."""
        self._inputs.clear()
        if self.compressor.boundary:
            self.may |= needed((args, kwargs))
            self.must = self.may
            self.least += sum(x.nbytes for x in {id(x): x for x in large((args, kwargs))}.values())
        else:
            self.may |= needed(output)

    def worked(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook of a module within."""
        self.must |= needed(output)
        if isinstance(module, nn.Linear) and output.requires_grad:
            (x,) = args
            place = x.data_ptr(), x.untyped_storage()._cdata, x.numel(), x._version
            if x.numel() >= MIN_NUMEL and place not in self._inputs:
                self._inputs.add(place)
                self.least += x.numel() * min(x.itemsize, output.itemsize)

    def end_step(self) -> None:
        """Judge what was packed, or left out as backward makes it again (a fused norm's output), and start again."""
        saved, self.compressor.saved = self.compressor.saved, SavedBytes()
        kept = saved.original + saved.left_out
        right = self.must <= (kept > 0) <= self.may and kept >= self.least
        right &= kept == (
            self.least if self.compressor.boundary else kept if self.before is None else self.before
        )
        if not right:
            which = "something" if self.must else "whatever it likes" if self.may else "nothing"
            self.wrong.append(
                f"{self.name} kept {kept} bytes packed or to be computed again, {self.before} in the step before; it had to keep "
                f"{self.least} and {which}: {saved}"
            )
        self.may, self.must, self.least, self.before = False, False, 0, kept


def needed(handed: Any) -> bool:
    """Whether some of it needs a gradient and is large enough to be packed."""
    return bool(large(handed))


def large(handed: Any) -> list[Tensor]:
    """What of it needs a gradient and is large enough to be packed."""
    return [
        x for x in tree_leaves(handed) if isinstance(x, Tensor) and x.requires_grad and x.numel() >= MIN_NUMEL
    ]


def watch(model: nn.Module, report: CompressionReport) -> list[Watched]:
    """Every target of ``model`` that packs, from now on."""
    modules = {clean(name): module for name, module in model.named_modules()}
    others = {clean(name) for name, _, _ in report.rows}
    found = []
    for name, module in modules.items():
        compressor = vars(module).get(MARK)
        if compressor is None or compressor.fmt is None:
            continue
        found.append(Watched(name, compressor))
        module.register_forward_hook(found[-1].handed, with_kwargs=True)
        for inner, own in modules.items() if not compressor.boundary else ():
            within = inner.startswith(f"{name}.") and not any(
                other != name and f"{inner}.".startswith(f"{other}.")
                for other in others
                if other.startswith(f"{name}.")
            )
            if within and keeps(own):
                own.register_forward_hook(found[-1].worked)
    return found


def keeps(module: nn.Module) -> bool:
    """Whether a module keeps what it works on: not FP8's, which keep it as they multiply it, nor a linear that is frozen."""
    if isinstance(module, nn.Linear):
        return not isinstance(module, FP8Linear) and module.weight.requires_grad
    if any(isinstance(m, FP8DotProductAttention) for m in module.modules()):
        return False
    return not isinstance(module, nn.Identity | nn.Dropout | nn.Embedding)
