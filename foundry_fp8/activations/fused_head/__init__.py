"""Cross-entropy of a head whose logits are never whole."""
