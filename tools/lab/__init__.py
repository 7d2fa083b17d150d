"""The GPU lab: everything that needs a real GPU, in stages that can be stopped and resumed."""
