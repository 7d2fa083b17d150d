"""The names, states and factories that other projects have."""
