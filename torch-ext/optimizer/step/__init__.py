"""What runs at every step: it walks the plan."""
