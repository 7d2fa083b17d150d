"""Process groups by their ranks, and collectives that say in their errors what they were for."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import Iterator, Optional, Sequence

import torch.distributed as dist
from torch import Tensor

Ranks = tuple[int, ...]  # in rising order

# Groups by their ranks, and the world that they are of, as another one may follow it. Each is made once in a process,
# since making one is a collective of its members. Weak: a group that outlives `destroy_process_group` aborts the exit.
_GROUPS: dict[Ranks, tuple[weakref.ref, weakref.ref]] = {}


def this_rank() -> int:
    """Return this process's rank, 0 where there is no other."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def group_of(ranks: Ranks) -> dist.ProcessGroup:
    """Return a process group of `ranks`, made when they first ask for it.

    Only its members take part in making it: another pipeline stage, which has other ranks, is not waited for.
    """
    world = dist.group.WORLD
    known_world, known = _GROUPS.get(ranks, (None, None))
    if known_world is not None and known_world() is world and known() is not None:
        return known()
    group = world
    if len(ranks) < world.size():
        timeout = world._get_backend(world._device_types[0]).options._timeout  # what the user gave
        # Of a world that is bound to a device torch would split the communicator, for which all ranks must come.
        device, world.bound_device_id = world.bound_device_id, None
        try:
            group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        finally:
            world.bound_device_id = device
    _GROUPS[ranks] = weakref.ref(world), weakref.ref(group)
    return group


def ranks_of(group: Optional[dist.ProcessGroup]) -> Optional[Ranks]:
    """Return the ranks of `group` in rising order, for which `group_of` returns it from now on; None for None."""
    if group is None:
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    if list(ranks) != sorted(ranks):
        raise ValueError(f"process_group must have its ranks in rising order, as those of DDP have, got {ranks}")
    _GROUPS[ranks] = weakref.ref(dist.group.WORLD), weakref.ref(group)
    return ranks


def all_reduce_max_(values: Tensor, ranks: Ranks, what: str, names: str = "") -> None:
    """Make each of `values`, which `what` names, the largest that one of `ranks` has; all of them must call it."""
    with explaining_timeouts(what, names):
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group_of(ranks))


@contextmanager
def explaining_timeouts(what: str, names: str = "") -> Iterator[None]:
    """Add to a failed collective's error which rank was waiting, for what, and of which parameters."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {this_rank()} failed while it waited for the other ranks' {what}{names and f' of {names}'}: a rank "
            f"has died, is late, or took another code path ({error})"
        ) from error


def shortened(names: Sequence[str]) -> str:
    """Return the first three names."""
    return ", ".join(names[:3]) + (" and others" if len(names) > 3 else "")
