"""Which process group is taken for some ranks, in a world of ranks that do not exist."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

PAIR = 0, 1


@pytest.fixture
def groups(kernel):
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield kernel.plan.process_groups
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("settle", ["by use", "by a user"])
@pytest.mark.parametrize("order", [1, -1])
def test_of_several_groups_the_name_decides_until_one_is_in_use(groups, settle, order):
    """Ranks may have their parameters, and so the groups, in another order."""
    first, second, third = sorted((dist.new_group(PAIR) for _ in range(3)), key=lambda group: group.group_name)
    groups.offer_groups([second, third][::order])
    if settle == "by use":
        assert groups.group_of(PAIR) is second
    else:
        assert groups.ranks_of(third) == PAIR
    groups.offer_groups([first, second, third][::order])
    assert groups.group_of(PAIR) is (second if settle == "by use" else third)


def test_all_ranks_have_the_group_of_the_world(groups):
    groups.offer_groups([dist.new_group([0, 1, 2, 3])])
    assert groups.group_of((0, 1, 2, 3)) is dist.group.WORLD


def test_ranks_that_the_world_lacks_have_no_group(groups):
    with pytest.raises(RuntimeError, match=r"0, 4 share up\.weight, and there are only 4 now"):
        groups.group_of((0, 4), "up.weight")


def test_a_group_of_an_earlier_world_is_neither_taken_nor_offered(groups):
    before = groups.group_of(PAIR)
    dist.destroy_process_group()
    with pytest.raises(RuntimeError, match=r"was destroyed, and ranks 0, 1 still share up\.weight"):
        groups.group_of(PAIR, "up.weight")
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    groups.offer_groups([before])
    assert groups.group_of(PAIR) is not before and groups.group_of(PAIR) is groups.group_of(PAIR)


def test_a_group_that_is_made_again_has_another_name(groups):
    """A store may still have what its ranks wrote under the last one."""
    names = []
    for _ in range(2):
        group = groups._new_group(PAIR, "")
        names.append(group.group_name)
        dist.destroy_process_group(group)
    assert len(set(names)) == 2 and not dist.new_group(PAIR).group_name.startswith("optimizer")


def test_what_is_no_group_of_this_process_is_refused(groups):
    assert groups.ranks_of(None) is None
    for value in (dist.GroupMember.NON_GROUP_MEMBER, (0, 1)):
        with pytest.raises(ValueError, match=r"must be a torch\.distributed\.ProcessGroup with this process, rank 0"):
            groups.ranks_of(value)


def test_memory_that_runs_out_is_no_matter_of_other_ranks(groups):
    with pytest.raises(torch.OutOfMemoryError, match=r"^no memory$"), groups.explaining_timeouts("flags", "up.weight"):
        raise torch.OutOfMemoryError("no memory")
    with pytest.raises(RuntimeError, match=r"rank 0 failed .* the other ranks' flags of up\.weight: .*late"):
        with groups.explaining_timeouts("flags", "up.weight"):
            raise RuntimeError("late")
