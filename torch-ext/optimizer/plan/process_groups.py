"""Process groups, found by their ranks, and collectives whose errors say what they were for."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import Counter
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Iterable, Iterator, Optional

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ..parameters.names import listed

Ranks = tuple[int, ...]  # in rising order

# Groups by their ranks, each with the world that it belongs to, since a process may make another world later. Each
# group is made once in a process, because making one is a collective of its members. The references are weak: a group
# that outlives `destroy_process_group` aborts the process at its exit.
_GROUPS: dict[Ranks, tuple[weakref.ref, weakref.ref]] = {}
# The ranks whose group is in use in a world, or was named by the user: no other one takes its place.
_SETTLED: weakref.WeakKeyDictionary[dist.ProcessGroup, set[Ranks]] = weakref.WeakKeyDictionary()
# How many groups this process has made for the same ranks, in each world: after a restart, new processes count from 0.
_MADE: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[Ranks]] = weakref.WeakKeyDictionary()
# The name of the group that this thread is making.
_NAMED_HERE = threading.local()


def this_rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def group_of(ranks: Ranks, names: str = "") -> dist.ProcessGroup:
    """Return a process group of `ranks`: a known one, or a new one, which all of them must ask for together.

    Only the members take part in making it, so ranks of another pipeline stage are not waited for. If the group cannot
    be made, the error names the parameters `names`.
    """
    group, world = _known(ranks), dist.group.WORLD
    if world is None:
        raise RuntimeError(
            f"the process group was destroyed, and ranks {listed([*map(str, ranks)])} still share {names}"
        )
    if group is None and ranks[-1] >= world.size():
        raise RuntimeError(
            f"ranks {listed([*map(str, ranks)])} share {names}, and there are only {world.size()} now: make the "
            "optimizer anew"
        )
    if group is None:
        group = world if len(ranks) == world.size() else _new_group(ranks, names)
        _keep(ranks, group)
    _SETTLED.setdefault(world, set()).add(ranks)
    return group


def offer_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Let `group_of` return these groups for their ranks, unless it has returned others: communicators are expensive.

    Of several groups of the same ranks the name decides, because ranks may have their parameters in another order.
    """
    of_this_world = [group for group in groups if group in distributed_c10d._world.pg_group_ranks]
    for group in sorted(of_this_world, key=lambda group: group.group_name, reverse=True):
        ranks = tuple(dist.get_process_group_ranks(group))
        is_settled = ranks in _SETTLED.get(dist.group.WORLD, ())
        if len(ranks) < dist.get_world_size() and not is_settled:
            _keep(ranks, group)


def ranks_of(group: Optional[dist.ProcessGroup]) -> Optional[Ranks]:
    """Return the ranks of `group`, and let `group_of` return it for them; None for None.

    Raises ValueError for ranks that are not in ascending order, and for anything but a process group: torch gives
    another object to processes that are not in the group that they have made.
    """
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(
            "process_group must be a torch.distributed.ProcessGroup with this process, "
            f"rank {this_rank()}, got {group!r}"
        )
    ranks = tuple(dist.get_process_group_ranks(group))
    if list(ranks) != sorted(ranks):
        raise ValueError(f"process_group must have its ranks in ascending order, as under DDP, got {ranks}")
    _keep(ranks, group)
    _SETTLED.setdefault(dist.group.WORLD, set()).add(ranks)
    return ranks


def all_reduce_sum_(values: Tensor, ranks: Ranks, what: str, names: str = "") -> None:
    """Replace each of `values` by its sum over `ranks`. Collective; `what` names the values in an error."""
    _all_reduce_(values, dist.ReduceOp.SUM, ranks, what, names)


def all_reduce_max_(values: Tensor, ranks: Ranks, what: str, names: str = "") -> None:
    """Replace each of `values` by its maximum over `ranks`. Collective; `what` names the values in an error."""
    _all_reduce_(values, dist.ReduceOp.MAX, ranks, what, names)


def _all_reduce_(values: Tensor, op: dist.ReduceOp, ranks: Ranks, what: str, names: str) -> None:
    group = group_of(ranks, names)
    with explaining_timeouts(what, names):
        dist.all_reduce(values, op, group=group)


def gathered(value: Any, ranks: Ranks, device: torch.device, what: str, names: str = "") -> list[Any]:
    """Return the value of each of `ranks`, anything that pickles. Collective, and the host waits for it.

    Over NCCL it travels by `device`. Torch would take the current one, which may be the same on all ranks.
    """
    values: list[Any] = [None] * len(ranks)
    group = group_of(ranks, names)
    on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with on_device, explaining_timeouts(what, names):
        dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def explaining_timeouts(what: str, names: str = "") -> Iterator[None]:
    """Add to a failed collective's error which rank was waiting, for what, and of which parameters."""
    try:
        yield
    except torch.OutOfMemoryError:  # a RuntimeError that is no matter of other ranks
        raise
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {this_rank()} failed while it waited for the other ranks' {what}{names and f' of {names}'}: a rank "
            f"has died, is late, or took another code path ({error})"
        ) from error


def _known(ranks: Ranks) -> Optional[dist.ProcessGroup]:
    world, group = _GROUPS.get(ranks, (None, None))
    return group() if world is not None and world() is dist.group.WORLD else None


def _keep(ranks: Ranks, group: dist.ProcessGroup) -> None:
    _GROUPS[ranks] = weakref.ref(dist.group.WORLD), weakref.ref(group)


def _new_group(ranks: Ranks, names: str) -> dist.ProcessGroup:
    """Make a group of `ranks` in which only these take part, with the world's timeout."""
    world = dist.group.WORLD
    # If the world is bound to a device, torch would split its communicator, which is a collective of all ranks.
    device, world.bound_device_id = world.bound_device_id, None
    try:
        with (
            _named_by_ranks(ranks),
            explaining_timeouts(f"process group of ranks {listed([*map(str, ranks)])}", names),
        ):
            return dist.new_group(list(ranks), timeout=_timeout_of(world), use_local_synchronization=True)
    finally:
        world.bound_device_id = device


@contextmanager
def _named_by_ranks(ranks: Ranks) -> Iterator[None]:
    """Give the group made inside this context a name from its ranks and from how many groups of them there were before.

    Members find each other by the name. If only its members make a group, torch derives the name from the number of
    groups that a process knows. Two ranks that know different numbers, such as a node's leader and another rank, would
    never meet.
    """
    digest = hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()
    taken = set(distributed_c10d._world.pg_names.values())  # also by another copy of this package
    made = _MADE.setdefault(dist.group.WORLD, Counter())
    while (name := f"optimizer_{digest}_{made[ranks]}") in taken:
        made[ranks] += 1
    made[ranks] += 1
    replaced = distributed_c10d._process_group_name

    def chosen(*args: Any, **kwargs: Any) -> str:  # other threads may be making other groups
        return getattr(_NAMED_HERE, "name", None) or replaced(*args, **kwargs)

    _NAMED_HERE.name, distributed_c10d._process_group_name = name, chosen
    try:
        yield
    finally:
        _NAMED_HERE.name = None
        if distributed_c10d._process_group_name is chosen:  # if not, another thread still needs what replaced it
            distributed_c10d._process_group_name = replaced


def _timeout_of(group: dist.ProcessGroup) -> Optional[timedelta]:
    """Return the timeout that the user gave a group; None if its backend does not say, which means torch's default."""
    backend = group._get_backend(group._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", None)
