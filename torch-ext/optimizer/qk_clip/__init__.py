"""QK-clip: scales down rows of query and key weights whose attention logits have grown too large."""
