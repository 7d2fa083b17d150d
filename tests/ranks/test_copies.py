"""Copies that differ in one bit are found, wherever it is, and named with their ranks."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

from tests.support.backends import error_of_step, on_every_backend
from tests.support.rank_pool import device_of_ranks
from tests.support.refusals import error_of
from tests.support.sharded_models import LAYOUTS, Case, Layout, Spec, muon, part_of

pytestmark = on_every_backend()

KEYS = {
    "up.weight": ["parameter", "momentum_buffer", "second_moment"],
    "up.bias": ["parameter", "exp_avg", "exp_avg_sq", "step"],
}
TENSORS = [(name, key) for name, keys in KEYS.items() for key in keys]


def trained(kernel, case: Case):
    params = [part_of(case, i) for i in range(len(case.specs))]
    optimizer = muon(kernel, case, params, **({"process_group": dist.group.WORLD} if case.shared else {}))
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.check_copies()
    return optimizer, params


def error_of_flipped_bit(kernel, case: Case, number: int, key: str, odd: int, bit: int):
    """Flip a bit of the last element of a tensor on one rank; return the error, None without one."""
    optimizer, params = trained(kernel, case)
    p = params[number]
    tensor = p.detach() if key == "parameter" else optimizer.state[p][key]
    local = getattr(tensor, "_local_tensor", tensor)
    if dist.get_rank() == odd:
        bits = local.reshape(-1)[-1:].view({2: torch.int16, 4: torch.int32}[local.element_size()])
        last = local[(-1,) * local.ndim] if local.ndim else local
        last.copy_((bits ^ (1 << bit)).view(local.dtype)[0])
    try:
        optimizer.check_copies()
    except RuntimeError as error:
        return str(error)
    return None


def compared_beside_gradients_of_others(kernel, case: Case) -> None:
    """Compare copies while rank 1 alone has no gradients."""
    optimizer, params = trained(kernel, case)
    for p in params if dist.get_rank() == 1 else ():
        p.grad = None
    optimizer.check_copies()


def specs_on(layout: Layout | None) -> tuple[Spec, ...]:
    return Spec("up.weight", (13, 9), layout), Spec("up.bias", (13,), layout)


def test_copies_are_equal_whichever_ranks_have_gradients(pools):
    """A step needs them together, and a comparison does not, which may come behind a backward pass or before it."""
    pools(4).run(compared_beside_gradients_of_others, Case(specs_on(LAYOUTS["hsdp"])))


@pytest.mark.parametrize("name, key", TENSORS)
@pytest.mark.parametrize("bit", [0, 7, 14])
def test_a_flipped_bit_on_one_copy_is_named(pools, name, key, bit):
    case, number = Case(specs_on(LAYOUTS["hsdp"]), {"second_moment": "rows"}), list(KEYS).index(name)
    for error in pools(4).run(error_of_flipped_bit, case, number, key, 3, bit):
        assert name in error and (key == "parameter" or f"{key} of {name}" in error)
        assert "[1]" in error and "[3]" in error and "[0" not in error


@pytest.mark.parametrize("layout", [None, LAYOUTS["replicated"]], ids=["plain", "replicated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_many_copies_the_odd_one_is_named(pools, layout, dtype):
    case = Case(specs_on(layout), dtype=dtype, shared=layout is None)
    for error in pools(4).run(error_of_flipped_bit, case, 0, "parameter", 2, 3):
        assert "up.weight differs between ranks [0, 1, 3] and [2]" in error


def test_copies_on_unlike_meshes_are_told_apart(pools):
    """Of the second matrix all ranks have a copy."""
    specs = (Spec("up.weight", (13, 9), LAYOUTS["hsdp"]), Spec("down.weight", (13, 9), Layout((4, 1), ("r", "0"))))
    for error in pools(4).run(error_of_flipped_bit, Case(specs), 1, "parameter", 3, 3):
        assert error == "copies differ: down.weight differs between ranks [0, 1, 2] and [3]"


def error_of_two_of_one_name(kernel, case: Case, key: str) -> str:
    """The first parameter, or its momentum, is another one on rank 2."""
    params = [part_of(case, i) for i in range(len(case.specs))]
    optimizer = kernel.Muon([{"params": [(spec.name, p)]} for spec, p in zip(case.specs, params)])
    if dist.get_rank() == 2:
        {**optimizer.state[params[0]], "up": params[0].data}[key]._local_tensor.add_(1)
    with pytest.raises(RuntimeError) as caught:
        optimizer.check_copies()
    return str(caught.value)


@pytest.mark.parametrize("key, named", [("up", "up.weight"), ("momentum_buffer", "momentum_buffer of up.weight")])
def test_copies_of_parameters_of_one_name_in_two_groups_are_told_apart(pools, key, named):
    case = Case((Spec("up.weight", (13, 9), LAYOUTS["replicated"]),) * 2)
    for error in pools(4).run(error_of_two_of_one_name, case, key):
        assert error == f"copies differ: {named} differs between ranks [0, 1, 3] and [2]"


def errors_of_a_frozen_one(kernel, case: Case) -> list[str | None]:
    """It is another one on rank 2. Return what a step says, and then a comparison."""
    p = part_of(case, 0).requires_grad_(False)
    if dist.get_rank() == 2:
        p.data._local_tensor.add_(1)
    optimizer = kernel.Muon([("up.weight", p)])
    return [error_of(optimizer.step), error_of(optimizer.check_copies)]


def test_copies_of_what_is_frozen_are_compared_when_the_user_asks_for_it(pools):
    for step, comparison in pools(4).run(errors_of_a_frozen_one, Case(specs_on(LAYOUTS["replicated"])[:1])):
        assert step is None and "up.weight differs between ranks [0, 1, 3] and [2]" in comparison


def error_of_many(kernel, case: Case) -> str:
    """Parameters and state of rank 2 are others than those of the rest."""
    optimizer, params = trained(kernel, case)
    if dist.get_rank() == 2:
        for value in (value for p in params for value in (p.detach(), *optimizer.state[p].values())):
            getattr(value, "_local_tensor", value).add_(1)
    with pytest.raises(RuntimeError) as caught:
        optimizer.check_copies()
    return str(caught.value)


@pytest.mark.parametrize("count, end", [(1, "[2]"), (2, ", and 4 more")])
def test_of_many_tensors_the_first_are_named_and_the_rest_counted(pools, count, end):
    """A matrix has three, and a vector four."""
    case = Case(specs_on(LAYOUTS["replicated"])[:count], {"second_moment": "rows"})
    for error in pools(4).run(error_of_many, case):
        assert error.count("differs between ranks [0, 1, 3] and [2]") == 3 and error.endswith(end)
        assert ("more" in error) == (count > 1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_equal_copies_and_single_parts_pass(pools, name):
    specs = (Spec("up.weight", (13, 9), LAYOUTS[name]), Spec("small.weight", (1, 9), LAYOUTS[name]))
    pools(4).run(check_after_a_step, Case(specs))


def check_after_a_step(kernel, case: Case) -> None:
    """Rank 0 has no gradient then, as when it alone prepares the next step: only a step compares them."""
    optimizer, params = trained(kernel, case)
    if dist.get_rank() == 0:
        params[0].grad = None
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        optimizer.check_copies()


def test_parts_that_have_no_copy_are_not_compared(pools):
    assert pools(4).run(error_of_flipped_bit, Case(specs_on(LAYOUTS["rows"])), 0, "parameter", 2, 3) == [None] * 4


def error_of_reordered_pairs(kernel, case: Case):
    """Reverse the order of a copy's pairs, or flip a bit of two elements to and fro; return both errors."""
    errors = []
    for change in (lambda local: local.view(-1, 2).flip(0).view_as(local), other_ones):
        optimizer, params = trained(kernel, case)
        local = params[0].detach()._local_tensor
        if dist.get_rank() == 3:
            local.copy_(change(local.clone()))
        with pytest.raises(RuntimeError) as caught:
            optimizer.check_copies()
        errors.append(str(caught.value))
    return errors


def other_ones(local):
    """Take from the bits of an element in the middle what the first one gets: the sum of all stays."""
    bits = local.view(torch.int32).view(-1)
    bits[0] += 1 << 5
    bits[len(bits) // 4 * 2] -= 1 << 5  # like the first one, it begins a pair, which counts as one number
    return local


def checksums(kernel, size: int, dtype: torch.dtype) -> set[int]:
    """Return those of one value at several places of a buffer, which begins elsewhere on each rank."""
    values, device = torch.arange(size, dtype=dtype), device_of_ranks()
    first = dist.get_rank()
    buffers = [torch.zeros(size + offset, dtype=dtype, device=device) for offset in range(first, first + 4)]
    views = [buffer[len(buffer) - size :].copy_(values) for buffer in buffers]
    return {int(kernel.step.agreement.copies._checksum(view)) for view in views}


@pytest.mark.parametrize("size", [0, 2, 3, 64, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_checksum_does_not_depend_on_where_a_tensor_lies(pools, dtype, size):
    """Weights may be views of one buffer on one rank, and at odd addresses there."""
    one, other = pools(2).run(checksums, size, dtype)
    assert one == other and len(one) == 1


def test_changes_that_keep_the_sum_are_found(pools):
    for errors in pools(4).run(error_of_reordered_pairs, Case(specs_on(LAYOUTS["hsdp"]))):
        assert all("up.weight differs between ranks [1] and [3]" in error for error in errors)


def errors_after(kernel, case: Case, key: str, value, repaired: bool):
    """Let one rank have another setting for one step; return what the step after that and a comparison say.

    `repaired` gives all ranks one count of the steps that round at random.
    """
    optimizer, params = trained(kernel, case)
    params[0].grad = part_of(case._replace(seed=1), 0).data
    optimizer.step()
    group = optimizer.param_groups[0]
    usual, errors = group[key], []
    group[key] = value if dist.get_rank() == 3 else usual
    errors.append(error_of_step(optimizer))
    group[key] = usual
    group["rounding_step"] = 1 if repaired else group["rounding_step"]
    return [*errors, error_of_step(optimizer), error_of(optimizer.check_copies)]


@pytest.mark.parametrize("repaired", [False, True])
def test_after_a_disagreement_about_random_rounding_ranks_need_one_count(pools, repaired):
    case = Case(specs_on(LAYOUTS["hsdp"])[:1], dtype=torch.bfloat16)
    for first, second, last in pools(4).run(errors_after, case, "stochastic_rounding", True, repaired):
        assert "'stochastic_rounding': True" in first
        assert (second is None) == (last is None) == repaired
        assert repaired or "'rounding_step': 1" in second


def test_after_a_disagreement_about_8_bit_momentum_copies_are_equal(pools):
    """The conversion on the odd rank is undone."""
    if pools.device != "cpu":
        pytest.skip("nobody waits for a GPU before the messages of unlike plans: a timeout ends the step")
    case = Case(specs_on(LAYOUTS["hsdp"])[:1])
    for first, *later in pools(4).run(errors_after, case, "momentum_dtype", "int8", True):
        assert "int8" in first and later == [None, None]


def compared_without_others(kernel) -> str:
    """As under DDP where nobody names the process group: return the warning."""
    optimizer = kernel.Muon([("up.weight", torch.nn.Parameter(torch.full((8, 4), float(dist.get_rank()))))])
    with pytest.warns(UserWarning) as told:
        optimizer.check_copies()
    return str(told[0].message)


def test_that_nothing_is_compared_is_said(kernel, pools):
    """Not where nobody else is."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        kernel.Muon([("up.weight", torch.nn.Parameter(torch.ones(8, 4)))]).check_copies()
    for said in pools(2).run(compared_without_others):
        assert said.startswith("check_copies compares nothing") and "ExchangeOptions(process_group=" in said
