"""Triton's interpreter in less than half the time: what it works out anew at each operation is remembered.

It lists the members of ``triton.language`` at every call of a kernel or of a function in one, fills a table of dtypes to look up one,
and a block's type and shape are made anew for every value of that type. What is remembered here depends on its arguments alone, so
that the kernels compute what they did.
"""

import functools
import inspect

import triton.language as tl
from triton.runtime import interpreter

its_own_dtype = interpreter._get_np_dtype
its_own_block_type = tl.core.block_type.__init__
its_own_tensor = tl.core.tensor.__init__
dtypes, blocks, shapes = {}, {}, {}


@functools.cache
def builtins_of(package) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def patch_builtin(package, builder, *scope):
    """Drop-in for ``interpreter._patch_builtin``. What is patched already is no builtin any more."""
    for name in builtins_of(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, *scope)


def np_dtype(of):
    """Drop-in for ``interpreter._get_np_dtype``."""
    name = of.scalar.name
    if name not in dtypes:
        dtypes[name] = its_own_dtype(of)
    return dtypes[name]


def init_block_type(self, element_ty, shape):
    """Drop-in for ``block_type.__init__``."""
    key = (element_ty.name, *(tl.core._unwrap_if_constexpr(size) for size in shape))
    if key not in blocks:
        its_own_block_type(self, element_ty, shape)
        blocks[key] = self.shape, self.numel, self.name
    self.element_ty = element_ty
    self.shape, self.numel, self.name = blocks[key]


def init_tensor(self, handle, type):
    """Drop-in for ``tensor.__init__``."""
    if type.name not in shapes:
        its_own_tensor(self, handle, type)
        shapes[type.name] = self.shape, self.numel
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = shapes[type.name]


def remember(monkeypatch):
    """Until ``monkeypatch`` is undone."""
    monkeypatch.setattr(interpreter, "_patch_builtin", patch_builtin)
    monkeypatch.setattr(interpreter, "_get_np_dtype", np_dtype)
    monkeypatch.setattr(tl.core.block_type, "__init__", init_block_type)
    monkeypatch.setattr(tl.core.tensor, "__init__", init_tensor)
