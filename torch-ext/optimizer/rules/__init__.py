"""Update rules: functions of their arguments alone, on lists of local tensors."""
