"""The GPU lab: what only a GPU can show, in stages that can be stopped and resumed."""
