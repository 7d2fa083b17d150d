"""What a model's modules tell of its parameters: `groups_for`, and what Muon would do before there is one."""
