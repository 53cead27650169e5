"""Plans that measure some of a block's options: those that a test asks about."""

from foundry_fp8.planning.memory import planner
from foundry_fp8.planning.memory.options import options_of


def plan_only(patch, *names):
    """Have the planner, as long as pytest's ``patch`` holds, measure no options but ``none``, ``block`` and those of these names."""
    wanted = {"none", "block", *names}
    patch.setattr(
        planner,
        "options_of",
        lambda block, formats: [o for o in options_of(block, formats=formats) if o.name in wanted],
    )
