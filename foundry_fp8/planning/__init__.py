"""Plans measured on the real model: what to recompute and what to compress so that a run fits in memory."""
