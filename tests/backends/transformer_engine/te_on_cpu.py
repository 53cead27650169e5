"""Transformer Engine's real Python modules on a machine with no GPU and no compiled extension.

Everything in Python is TE's own: recipes, autocast, modules, autograd functions, quantiser objects, tensors. What is
replaced is the extension: casts and GEMMs of per-tensor FP8 are computed here by a few lines of torch, all other names are
mocks. `load` changes the process for good (torch.cuda answers as a GPU), so tests call it in a process of its own.
"""

import contextlib
import enum
import functools
import importlib.util
import os
import re
import sys
import types
import warnings
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode

FLOAT8 = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}
ABSENT = ("onnxscript", "nvdlfw_inspect", "cudnn")
"""Packages that TE imports and these tests do not need; mocked where they are not installed."""


def load(root, capability=(10, 0)):
    """Import `transformer_engine.pytorch` from the unpacked wheel at `root`; returns it.

    On compute capability 10 TE keeps no transposed copies, so the GEMM below needs the row-wise bytes alone.
    """
    import triton

    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    triton.runtime.driver.set_active(_TritonDriver())
    for name in ABSENT:
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = _Mock(name)
            sys.modules[name].api = sys.modules[f"{name}.api"] = types.SimpleNamespace(DEBUG_MANAGER=None)
    extension = _Mock("transformer_engine_torch")
    extension.DType = _dtype_enum(root)
    for cls in ("FP8FwdTensors", "FP8BwdTensors"):
        names = ("INPUT", "WEIGHT", "OUTPUT") if cls == "FP8FwdTensors" else ("OUTPUT", "INPUT")
        prefix = "GEMM{}_{}" if cls == "FP8FwdTensors" else "GRAD_{1}{0}"
        members = {
            prefix.format(g, n): i for i, (g, n) in enumerate((g, n) for g in (1, 2, 3) for n in names)
        }
        setattr(extension, cls, enum.IntEnum(cls, members))
    backends = ("No_Backend", "F16_arbitrary_seqlen", "FP8", "F16_max512_seqlen")
    if release(root) >= (2, 15):
        backends = backends[:3]
    extension.NVTE_Fused_Attn_Backend = enum.IntEnum(
        "NVTE_Fused_Attn_Backend", {f"NVTE_{n}": i for i, n in enumerate(backends)}
    )
    sys.modules["transformer_engine_torch"] = extension
    package = types.ModuleType("transformer_engine")
    package.__path__ = [os.path.join(root, "transformer_engine")]
    package.__version__ = ".".join(map(str, release(root)))
    sys.modules["transformer_engine"] = package
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda *args, **kwargs: None
    _pretend_a_gpu(capability)
    _Extension().install(extension)
    with warnings.catch_warnings():  # older releases script functions, which newer torches call deprecated
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
        return importlib.import_module("transformer_engine.pytorch")


def release(root):
    """The version of the unpacked wheel, from the folder's name."""
    return tuple(int(n) for n in os.path.basename(os.path.normpath(root)).split("."))


def _pretend_a_gpu(capability):
    properties = types.SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=132)
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_properties = lambda *args: properties
    torch.cuda.get_device_capability = lambda *args: capability
    torch.cuda.nvtx = MagicMock()
    torch.cuda.device = lambda *args: contextlib.nullcontext()
    autocast_enabled, autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    torch.is_autocast_enabled = lambda *args: autocast_enabled("cpu")
    torch.get_autocast_dtype = lambda *args: autocast_dtype("cpu")
    torch.get_autocast_gpu_dtype = torch.get_autocast_dtype
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.is_cuda = property(lambda self: True)
    _OnCpu().__enter__()


class _OnCpu(TorchFunctionMode):
    """TE allocates on "cuda"; here that is the CPU. Autocast for the GPU is autocast for the CPU."""

    def __torch_function__(self, function, classes, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class _Mock(types.ModuleType):
    """A module in which every name is a mock."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=name)
        setattr(self, name, value)
        return value


class _TritonDriver:
    def __getattr__(self, name):
        return lambda *args, **kwargs: lambda *a, **k: 0.0


def _dtype_enum(root):
    """The members of TE's DType, read from its own constants where that version lists them there."""
    with open(os.path.join(root, "transformer_engine", "pytorch", "constants.py")) as file:
        block = re.search(r"class DType.*?(?=\n\S)", file.read(), re.S)
    names = re.findall(r"^    (k\w+) *= *(\d+|[^\n]+)", block.group(0), re.M) if block else []
    if not names:
        order = "Byte Int16 Int32 Int64 Float32 Float16 BFloat16 Float8E4M3 Float8E5M2 Float8E8M0 Float4E2M1"
        names = [(f"k{name}", str(i)) for i, name in enumerate(order.split())]
    return enum.IntEnum("DType", {n: int(v) if v.isdigit() else i for i, (n, v) in enumerate(names)})


class _Extension:
    """What the compiled extension does for per-tensor FP8, on a CPU."""

    def __init__(self):
        self.casts = []
        self.split_accumulators = []

    @functools.cached_property
    def tensors(self):
        return importlib.import_module("transformer_engine.pytorch.tensor.float8_tensor")

    @functools.cached_property
    def torch_dtype(self):
        constants = importlib.import_module("transformer_engine.pytorch.constants")
        return {int(code): dtype for dtype, code in constants.TE_DType.items()}

    def install(self, extension):
        extension.quantize = self.quantize
        extension.bgrad_quantize = self.bgrad_quantize
        extension.generic_gemm = self.generic_gemm
        extension.layernorm_fwd = self.layernorm_fwd
        extension.layernorm_bwd = self.layernorm_bwd
        extension.rmsnorm_fwd = self.rmsnorm_fwd
        extension.rmsnorm_bwd = self.rmsnorm_bwd
        extension.casts = self.casts
        extension.split_accumulators = self.split_accumulators
        extension.get_cublasLt_version = lambda: 130100
        extension.get_num_cublas_streams = lambda: 1

    def quantize(self, x, quantizer, output=None, noop=None):
        """Scale, saturate, cast; take the amax. Delayed: the quantiser's scale. Current: from this amax."""
        assert output is None
        x = x.detach().contiguous()
        fp8 = FLOAT8[quantizer.dtype.name]
        top = torch.finfo(fp8).max
        amax = x.abs().float().max()
        if type(quantizer).__name__ == "Float8Quantizer":
            scale = quantizer.scale
            torch.fmax(quantizer.amax, amax.view(1), out=quantizer.amax)
        else:
            scale = top / amax if 0 < amax < torch.inf else torch.tensor(1.0)
            if quantizer.force_pow_2_scales:
                scale = torch.exp2(torch.floor(torch.log2(scale)))
        self.casts.append((type(quantizer).__name__, fp8, float(scale)))
        data = (x.float() * scale).clamp(-top, top).to(fp8).view(torch.uint8)
        fields = {
            "data": data,
            "fp8_scale_inv": (1 / scale).view(1),
            "fp8_dtype": quantizer.dtype,
            "quantizer": quantizer,
        }
        if quantizer.internal:
            storage = getattr(self.tensors, "Float8TensorStorage", None) or self.tensors.Float8TensorBase
            return storage(**fields)
        return self.tensors.Float8Tensor(shape=x.shape, dtype=x.dtype, **fields)

    def layernorm_fwd(self, x, weight, bias, eps, out, quantizer, out_dtype, sm_margin, zero_centered):
        assert out is None and not zero_centered
        x = x.float()
        mean = x.mean(dim=-1, keepdim=True)
        rstd = (x.var(dim=-1, keepdim=True, unbiased=False) + eps).rsqrt()
        y = ((x - mean) * rstd * weight.float() + bias.float()).to(weight.dtype)
        return self.quantize(y, quantizer), mean, rstd

    def layernorm_bwd(self, dy, x, mean, rstd, weight, sm_margin, zero_centered):
        hat = (x.float() - mean) * rstd
        dy = dy.float().view_as(x)
        dhat = dy * weight.float()
        dx = rstd * (dhat - dhat.mean(-1, keepdim=True) - hat * (dhat * hat).mean(-1, keepdim=True))
        return dx.to(x.dtype), (dy * hat).sum(0).to(weight.dtype), dy.sum(0).to(weight.dtype)

    def rmsnorm_fwd(self, x, weight, eps, out, quantizer, out_dtype, sm_margin, zero_centered):
        assert out is None and not zero_centered
        x = x.float()
        rstd = (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
        return self.quantize((x * rstd * weight.float()).to(weight.dtype), quantizer), None, rstd

    def rmsnorm_bwd(self, dy, x, rstd, weight, sm_margin, zero_centered):
        dy, hat = dy.float().view_as(x), x.float() * rstd
        dhat = dy * weight.float()
        dx = rstd * (dhat - hat * (dhat * hat).mean(-1, keepdim=True))
        return dx.to(x.dtype), (dy * hat).sum(0).to(weight.dtype)

    def bgrad_quantize(self, dy, quantizer):
        return dy.flatten(0, -2).sum(dim=0), self.quantize(dy, quantizer)

    def generic_gemm(
        self,
        a,
        transa,
        b,
        transb,
        out,
        quantizer,
        out_dtype,
        bias,
        bias_dtype,
        gelu,
        gelu_in,
        grad,
        *rest,
        **kwargs,
    ):
        """cuBLAS is column-major: in row-major terms the result is op(b) @ op(a), with the layouts read from the right."""
        assert out is None and quantizer is None and not gelu
        self.split_accumulators.append(bool(rest[3]))
        (left, left_scale), (right, right_scale) = self.dense(b), self.dense(a)
        left, right = left.flatten(0, -2), right.flatten(0, -2)
        left = left.t() if transb else left
        right = right.t() if transa else right
        y = (left @ right) * (left_scale * right_scale)
        if bias is not None and not grad:
            y = y + bias.float()
        if not transb:
            y = y.unflatten(0, self.shape(b)[:-1])
        return y.to(self.torch_dtype[int(out_dtype)]), None, None, None

    def shape(self, x):
        return tuple(x._data.shape if hasattr(x, "_data") else x.shape)

    def dense(self, x):
        if not hasattr(x, "_data"):
            return x.detach().float(), 1.0
        fp8 = FLOAT8[type(x._fp8_dtype)(int(x._fp8_dtype)).name]
        return x._data.view(fp8).float(), x._scale_inv
