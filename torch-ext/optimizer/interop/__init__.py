"""States, names and factories of other projects, states of this package in other groups, and groups from a model."""
