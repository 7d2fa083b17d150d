"""What ranks compare before and after a step, so that those which share parameters take the same one."""
