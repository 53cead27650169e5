"""A norm or an activation and the linear that reads it, as `fuse` puts them together."""

from foundry_fp8.backends.native.fused import _activated, norm_forward
from foundry_fp8.model_structure.forms import norm_form


def norm_linear(linear, x, norm):
    return linear(norm_forward(type(norm), norm_form(norm))(norm, x))


def activation_linear(linear, x, activation, up=None):
    return linear(_activated(x, up, activation))
