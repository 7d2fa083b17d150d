"""Process groups by their ranks, and collectives that say in their errors what they were for."""

from __future__ import annotations

import hashlib
import weakref
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Iterator, Optional, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

Ranks = tuple[int, ...]  # in rising order

# Groups by their ranks, and the world that they are of, as another one may follow it. Each is made once in a process,
# since making one is a collective of its members. Weak: a group that outlives `destroy_process_group` aborts the exit.
_GROUPS: dict[Ranks, tuple[weakref.ref, weakref.ref]] = {}
# How many groups of the same ranks this process has made.
_MADE: Counter[Ranks] = Counter()


def this_rank() -> int:
    """Return this process's rank, 0 where there is no other."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Return how many ranks there are, 1 where nobody has made a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def group_of(ranks: Ranks, names: str = "") -> dist.ProcessGroup:
    """Return a process group of `ranks`: one that is known, or a new one, made when they first ask for it.

    Only its members take part in making it: another pipeline stage, which has other ranks, is not waited for. The error
    of a group that cannot be made says that it was for the parameters `names`.
    """
    group, world = _known(ranks), dist.group.WORLD
    if group is None:
        group = world if len(ranks) == world.size() else _new_group(ranks, names)
        _keep(ranks, group)
    return group


def offer_group(group: dist.ProcessGroup) -> None:
    """Let `group_of` return `group` for its ranks, if it knows none of them yet: communicators are dear."""
    ranks = tuple(dist.get_process_group_ranks(group))
    if list(ranks) == sorted(ranks) and len(ranks) < dist.get_world_size() and _known(ranks) is None:
        _keep(ranks, group)


def ranks_of(group: Optional[dist.ProcessGroup]) -> Optional[Ranks]:
    """Return the ranks of `group` in rising order, for which `group_of` returns it from now on; None for None."""
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"process_group must have rank {this_rank()} among its ranks, got what others get: {group}")
    ranks = tuple(dist.get_process_group_ranks(group))
    if list(ranks) != sorted(ranks):
        raise ValueError(f"process_group must have its ranks in rising order, as those of DDP have, got {ranks}")
    _keep(ranks, group)
    return ranks


def all_reduce_sum_(values: Tensor, ranks: Ranks, what: str, names: str = "") -> None:
    """Make each of `values`, which `what` names, the sum of those of all `ranks`; all of them must call it."""
    _all_reduce_(values, dist.ReduceOp.SUM, ranks, what, names)


def all_reduce_max_(values: Tensor, ranks: Ranks, what: str, names: str = "") -> None:
    """Make each of `values`, which `what` names, the largest that one of `ranks` has; all of them must call it."""
    _all_reduce_(values, dist.ReduceOp.MAX, ranks, what, names)


def _all_reduce_(values: Tensor, op: dist.ReduceOp, ranks: Ranks, what: str, names: str) -> None:
    group = group_of(ranks, names)
    with explaining_timeouts(what, names):
        dist.all_reduce(values, op, group=group)


def gathered(value: Any, ranks: Ranks, what: str, names: str = "") -> list[Any]:
    """Return the value, anything that pickles, of each of `ranks`; all of them must call it, and the host waits."""
    values: list[Any] = [None] * len(ranks)
    group = group_of(ranks, names)
    with explaining_timeouts(what, names):
        dist.all_gather_object(values, value, group=group)
    return values


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


def _known(ranks: Ranks) -> Optional[dist.ProcessGroup]:
    world, group = _GROUPS.get(ranks, (None, None))
    return group() if world is not None and world() is dist.group.WORLD else None


def _keep(ranks: Ranks, group: dist.ProcessGroup) -> None:
    _GROUPS[ranks] = weakref.ref(dist.group.WORLD), weakref.ref(group)


def _new_group(ranks: Ranks, names: str) -> dist.ProcessGroup:
    world = dist.group.WORLD
    # Of a world that is bound to a device torch would split the communicator, for which all ranks must come.
    device, world.bound_device_id = world.bound_device_id, None
    try:
        with (
            _named_by_ranks(ranks),
            explaining_timeouts(f"process group of ranks {shortened([*map(str, ranks)])}", names),
        ):
            return dist.new_group(list(ranks), timeout=_timeout_of(world), use_local_synchronization=True)
    finally:
        world.bound_device_id = device


@contextmanager
def _named_by_ranks(ranks: Ranks) -> Iterator[None]:
    """Name the group that is made meanwhile by its ranks, and by how many of the same ranks there were before.

    Members meet under the name. Torch derives that of a group which only its members make from how many groups a
    process knows: two ranks that know different numbers, as the leader of a node and another rank do, never meet.
    """
    digest = hashlib.sha1(repr(ranks).encode(), usedforsecurity=False).hexdigest()
    taken = set(distributed_c10d._world.pg_names.values())  # also by another copy of this package
    while (name := f"optimizer_{digest}_{_MADE[ranks]}") in taken:
        _MADE[ranks] += 1
    _MADE[ranks] += 1
    original = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda *_, **__: name
    try:
        yield
    finally:
        distributed_c10d._process_group_name = original


def _timeout_of(group: dist.ProcessGroup) -> Optional[timedelta]:
    """Return the timeout that the user gave a group, None where its backend does not say: torch's default."""
    backend = group._get_backend(group._device_types[0])
    return getattr(getattr(backend, "options", None), "_timeout", None)
