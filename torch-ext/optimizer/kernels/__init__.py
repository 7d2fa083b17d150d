"""Matrix products, norms and multi-tensor operations, and how fast they are on the present machine."""
