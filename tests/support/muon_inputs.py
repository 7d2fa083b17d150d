"""What torch's `OptimizerInfo` asks of an optimizer: settings that work, and inputs that are errors."""

import torch
from torch.nn import Parameter
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerErrorEnum,
    OptimizerInput,
    get_error_inputs_for_all_optims,
    optim_inputs_func_muon,
)

SPECIFIC = {
    "capturable": dict(capturable=True),
    "offload": dict(offload=True),
    "maximize": dict(maximize=True, weight_decay=0.1),
    "no Nesterov": dict(nesterov=False),
    "multiplier of torch": dict(adjust_lr_fn="original"),
    "NAdamW": dict(fallback="nadamw"),
    "cautious decay": dict(decay_mode="cautious", weight_decay=0.2),
    "independent decay": dict(decay_mode="independent", weight_decay=0.01),
    "float16": dict(ns_dtype="float16"),
    "tensor lr and weight_decay": dict(lr=torch.tensor(0.01), weight_decay=torch.tensor(0.1)),
}
# Ours has other words for one of torch's errors, and takes what is refused in the others, by names that it makes.
OTHER_WORDS = {"Tensor lr must be 1-element": "tensor of one element"}
TAKEN = {
    "all optimizer params should be with/without names",
    "all optimizer param groups should be with/without names.",
}
# Torch 2.15 has this one and warns; here it is an error.
UNORDERED = "warn on a bare unordered set of params"


def optim_inputs(device="cpu", dtype=None):
    """torch's inputs for its Muon, which ours takes all, and those for what it has beyond that."""
    additions = [OptimizerInput(params=None, kwargs=kwargs, desc=desc) for desc, kwargs in SPECIFIC.items()]
    return [*optim_inputs_func_muon(device, dtype), *additions]


def optim_error_inputs(device="cpu", dtype=torch.float32):
    """torch's inputs for all optimizers, but for `TAKEN`, and the two for its Muon that are errors here as well."""
    errors = [e for e in get_error_inputs_for_all_optims(device, dtype) if e.optimizer_error_input.desc not in TAKEN]
    for error in errors:
        error.error_regex = OTHER_WORDS.get(error.error_regex, error.error_regex)
        if error.optimizer_error_input.desc == UNORDERED:
            error.error_type, error.error_regex = TypeError, "not a set"
    arbitrary = OptimizerInput([torch.rand(2, 3)], dict(adjust_lr_fn="arbitrary"), "unknown multiplier")
    complex_ = OptimizerInput([torch.rand(2, 3, dtype=torch.complex64)], {}, "does not support complex parameters")
    sparse = Parameter(torch.rand(4, 4))
    sparse.grad = torch.eye(4).to_sparse()
    return [
        *errors,
        ErrorOptimizerInput(arbitrary, error_type=ValueError, error_regex="'arbitrary' is none of"),
        ErrorOptimizerInput(complex_, error_type=TypeError, error_regex="complex64"),
        ErrorOptimizerInput(
            OptimizerInput([sparse], {}, "sparse gradient"),
            error_on=OptimizerErrorEnum.STEP_ERROR,
            error_type=ValueError,
            error_regex="sparse",
        ),
    ]
