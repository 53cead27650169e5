"""FP8 attention alone, in a model whose linears stay as they are."""

from foundry_fp8.backends import load_backend
from foundry_fp8.surgery.attention import plan_attention


def convert_attention(model, backend="emulated", **options):
    """Plan and carry out; returns the report's rows, and the FP8 attentions by name."""
    plan = plan_attention(model, runner=load_backend(backend).attention(), **options)
    plan.carry_out(model)
    return plan.rows, plan.converted
