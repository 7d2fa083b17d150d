"""QK-clip: rows of query and key weights are scaled down where attention logits have grown too large."""
