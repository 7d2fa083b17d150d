"""What ranks that share parameters compare and agree on: steps, copies, settings, and the choice of products."""
