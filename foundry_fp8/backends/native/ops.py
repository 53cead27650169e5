"""The kernels as torch operators, so that ``torch.compile`` sees one node with known outputs and does not look inside.

Operators take tensors, numbers and strings; an output that was not asked for is an empty tensor, in eager mode ``None``. Passing
through torch's dispatcher costs the host more than the launch does. So each has its function beside it (``direct``), to be called
where nobody would notice (:func:`unnoticed`): in eager mode, unless a mode watches operators (fake tensors, selective checkpointing,
counters).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foundry_fp8.backends.native import products
from foundry_fp8.backends.native.plan import FORMATS
from foundry_fp8.compat.dispatch_mode import watching_modes
from foundry_fp8.kernels.blockwise import quantize_blockwise as quantize_blockwise_kernel
from foundry_fp8.kernels.blockwise import scales_of
from foundry_fp8.kernels.gated import activation_backward as activation_backward_kernel
from foundry_fp8.kernels.launch import GEMM_MULTIPLE, on_its_device, round_up
from foundry_fp8.kernels.norms import norm_backward as norm_backward_kernel
from foundry_fp8.kernels.norms import norm_statistics as norm_statistics_kernel
from foundry_fp8.kernels.producers import Producer
from foundry_fp8.kernels.producers import produce as produce_kernel
from foundry_fp8.kernels.tensorwise import quantize_tensorwise as quantize_tensorwise_kernel
from foundry_fp8.kernels.zeros import unshared

__all__ = [
    "activation_backward", "blockwise_gemm", "norm_backward", "norm_statistics", "produce", "quantize_blockwise",
    "quantize_tensorwise", "tensorwise_gemm", "unnoticed",
]  # fmt: skip


def _noticed() -> bool:
    """Whether a mode watches operators, or autograd would record them."""
    return watching_modes() > 0 or torch.is_grad_enabled()


def unnoticed() -> bool:
    """Whether kernels' functions may be called past torch's dispatcher now. Who calls several asks once."""
    return not torch.compiler.is_compiling() and not _noticed()


def operator(*, mutates: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Make an operator of a function, of the same name and in the namespace ``foundry_fp8``.

    Its attributes: ``definition``, torch's; ``direct``, the function.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        direct = on_its_device(function)

        @functools.wraps(function)
        def whole(first: Tensor, *args: Any, **kwargs: Any) -> Any:
            with unshared():
                outputs = direct(first, *args, **kwargs)
            if isinstance(outputs, Tensor):
                return outputs
            return tuple(first.new_empty((0,)) if output is None else output for output in outputs)

        name = f"foundry_fp8::{function.__name__}"
        definition = torch.library.custom_op(name, whole, mutates_args=mutates)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return direct(*args) if unnoticed() else definition(*args)

        vars(call).update(definition=definition, direct=direct, register_fake=definition.register_fake)
        return call

    return decorate


def _made(x: Tensor, wanted: bool, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An output of a fake implementation, as :func:`operator` hands it on: empty where it was not asked for."""
    return x.new_empty(shape, dtype=dtype) if wanted else x.new_empty((0,))


@operator(mutates=("amax_slot",))
def quantize_tensorwise(
    x: Tensor, up: Tensor | None, mean: Tensor | None, rstd: Tensor | None, weight: Tensor | None, bias: Tensor | None, kind: int,
    scale: Tensor | None, known_amax: Tensor | None, amax_slot: Tensor | None,
    fmt: str, power_2: bool, rows: bool, columns: bool, column_sum: bool, constant: float | None = None, gemm_alpha: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """:func:`foundry_fp8.kernels.tensorwise.quantize_tensorwise`: data, data_t, (amax, gemm_scale, scale_inv), column_sum."""
    source = Producer(x, up, mean, rstd, weight, bias, kind)
    return quantize_tensorwise_kernel(  # type: ignore[return-value]
        source,
        FORMATS[fmt],
        scale=scale,
        known_amax=known_amax,
        power_2=power_2,
        amax_slot=amax_slot,
        rows=rows,
        columns=columns,
        column_sum=column_sum,
        constant=constant,
        alpha=gemm_alpha,
    )


@quantize_tensorwise.register_fake
def _(
    x, up, mean, rstd, weight, bias, kind, scale, known_amax, amax_slot, fmt, power_2, rows, columns, column_sum,
    constant=None, gemm_alpha=1.0,
):  # fmt: skip
    r, c = (round_up(size, GEMM_MULTIPLE) for size in x.shape)
    dtype = FORMATS[fmt].dtype
    return (
        _made(x, rows, (r, c), dtype),
        _made(x, columns, (c, r), dtype),
        x.new_empty_strided((3,), (4,), dtype=torch.float32),
        _made(x, column_sum, x.shape[1:], torch.float32),
    )


@operator()
def quantize_blockwise(
    x: Tensor, up: Tensor | None, mean: Tensor | None, rstd: Tensor | None, weight: Tensor | None, bias: Tensor | None, kind: int,
    fmt: str, group: int, square: bool, power_2: bool, rows: bool, columns: bool, column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """:func:`foundry_fp8.kernels.blockwise.quantize_blockwise`: data, gemm_scale, data_t, gemm_scale_t, column_sum."""
    source = Producer(x, up, mean, rstd, weight, bias, kind)
    return quantize_blockwise_kernel(  # type: ignore[return-value]
        source,
        FORMATS[fmt],
        group=group,
        square=square,
        power_2=power_2,
        rows=rows,
        columns=columns,
        column_sum=column_sum,
    )


@quantize_blockwise.register_fake
def _(x, up, mean, rstd, weight, bias, kind, fmt, group, square, power_2, rows, columns, column_sum):
    r, c = (round_up(size, group if group == 32 else GEMM_MULTIPLE) for size in x.shape)
    dtype = FORMATS[fmt].dtype
    return (
        _made(x, rows, (r, c), dtype),
        _made(x, rows, *scales_of(r, c, group, square)),
        _made(x, columns, (c, r), dtype),
        _made(x, columns, *scales_of(c, r, group, square)),
        _made(x, column_sum, x.shape[1:], torch.float32),
    )


tensorwise_gemm = operator()(products.tensorwise_gemm)


@tensorwise_gemm.register_fake
def _(a, a_scale, b, b_scale, bias, out_dtype, fast_accumulation):
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


blockwise_gemm = operator()(products.blockwise_gemm)


@blockwise_gemm.register_fake
def _(a, a_scale, b, b_scale, bias, m, n, out_dtype, square_b):
    return a.new_empty((m, n), dtype=out_dtype)


@operator()
def norm_statistics(x: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """:func:`foundry_fp8.kernels.norms.norm_statistics`: mean (empty unless centered), rstd."""
    mean, rstd = norm_statistics_kernel(x, eps, centered=centered)
    return mean, rstd  # type: ignore[return-value]


@norm_statistics.register_fake
def _(x, eps, centered):
    mean = x.new_empty((x.shape[0],) if centered else (0,), dtype=torch.float32)
    return mean, x.new_empty((x.shape[0],), dtype=torch.float32)


@operator()
def norm_backward(
    dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, mean: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`foundry_fp8.kernels.norms.norm_backward`."""
    return norm_backward_kernel(dy, x, rstd, weight, mean=mean, dtype=dtype)


@norm_backward.register_fake
def _(dy, x, rstd, weight, mean, dtype):
    vector = x.new_empty((x.shape[1],), dtype=dtype)
    return x.new_empty(x.shape), vector, vector.new_empty((0,) if mean is None else vector.shape)


@operator()
def activation_backward(dy: Tensor, x: Tensor, up: Tensor | None, kind: int) -> tuple[Tensor, Tensor]:
    """:func:`foundry_fp8.kernels.gated.activation_backward`; what does not apply is empty."""
    return activation_backward_kernel(dy, Producer(x, up, kind=kind).checked())  # type: ignore[return-value]


@activation_backward.register_fake
def _(dy, x, up, kind):
    return x.new_empty(x.shape), x.new_empty((0,) if up is None else x.shape)


@operator()
def produce(
    x: Tensor, up: Tensor | None, mean: Tensor | None, rstd: Tensor | None, weight: Tensor | None, bias: Tensor | None, kind: int,
) -> Tensor:  # fmt: skip
    """:func:`foundry_fp8.kernels.producers.produce`."""
    return produce_kernel(Producer(x, up, mean, rstd, weight, bias, kind))


@produce.register_fake
def _(x, up, mean, rstd, weight, bias, kind):
    return x.new_empty(x.shape)
