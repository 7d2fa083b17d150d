"""The plan of a step, made once and frozen, without tensors: batches, owners and messages."""
