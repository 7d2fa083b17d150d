"""Reports of the optimizer about itself: the branch of each parameter, the reason, the kernel and the cost."""
