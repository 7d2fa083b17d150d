"""The code of a step, which follows the plan."""
