"""From gradients to updated matrices: which are worked on together, and the stages each batch goes through."""
