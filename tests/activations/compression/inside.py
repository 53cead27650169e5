"""Running a function as the forward of a module that a compressor is attached to."""

from __future__ import annotations

from torch import nn

from foundry_fp8.activations.compression.saved import Compressor, UnpackedTensor
from foundry_fp8.numerics.packed import PackFormat

INT8 = PackFormat(name="int8")


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def inside(compressor, function, *args):
    """``function(*args)`` with what it saves given to ``compressor``."""
    module = Call(function)
    compressor.attach(module)
    return module(*args)


class Spy(Compressor):
    """Records what was packed in the end, and what was not."""

    def __init__(self, fmt=INT8, **options):
        super().__init__(fmt, **options)
        self.seen = []

    def pack(self, x):
        kept = super().pack(x)
        self.seen.append((x, kept))
        return kept

    @property
    def passed(self):
        return [x for x, kept in self.seen if isinstance(getattr(kept, "kept", kept), UnpackedTensor)]

    @property
    def packed(self):
        return [x for x, kept in self.seen if not isinstance(getattr(kept, "kept", kept), UnpackedTensor)]
