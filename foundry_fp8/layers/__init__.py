"""FP8 linear and attention layers, their delayed-scaling state, the ledger of GEMMs, and the Backend interface."""
