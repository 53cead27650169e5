"""Whether a function that ``torch.compile`` made waits further up for the code that runs now.

Cause: where hooks break the graph, the code runs as plain Python, and ``torch.compiler.is_compiling()``, torch's public
question, says no. Dynamo's callback for new frames, ``torch._C._dynamo.eval_frame.get_eval_frame_callback`` (torch 2.7 to
2.11), is set as long as a compiled caller is on the stack. Remove when torch has a public way to ask.
"""

from __future__ import annotations

from foundry_fp8.config.versions import moved

__all__ = ["compiled_caller_waits"]

try:
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
except ImportError as error:
    raise moved(
        "no longer has torch._C._dynamo.eval_frame.get_eval_frame_callback, by which foundry_fp8 refuses activation compression under "
        "torch.compile",
        "compiled_caller",
    ) from error


def compiled_caller_waits() -> bool:
    """True in plain Python that a compiled function called."""
    return get_eval_frame_callback() not in (None, False)
