"""What new plans change in the state, kept so that it can be undone if a plan cannot be made or ranks do not agree.

If a user changes a setting, the new plan may drop second moments, and then turn out to be impossible. Or the setting
was changed on one rank alone, and the step fails because the other ranks have another plan. When the user sets it back,
the moments must be back, too.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterable, Iterator, Mapping, MutableMapping, NamedTuple, Optional, Sequence

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..plan.layout import local_part

Entry = Mapping[str, Any]  # what a state has of one parameter


class _Change(NamedTuple):
    p: Tensor
    before: Optional[Entry]
    after: Optional[Entry]
    versions: list[int]  # of the tensors of `after`, which rise with each change in place


class StateChanges:
    """The entries of a state that new plans have changed, as they were and as they became."""

    def __init__(self):
        self._changes: list[_Change] = []
        # The state of parameters that are in no group. Somebody may put these back, as in training block by block.
        self.away: MutableMapping[Tensor, Any] = WeakIdKeyDictionary()

    def bring_back_(self, params: Iterable[Tensor], state: dict[Tensor, Any]) -> None:
        """Give `state` the entries of those of `params` that were away, unless it has others."""
        for p in params:
            entry = self.away.pop(p, None)
            if entry and not state.get(p):
                state[p] = entry

    @contextmanager
    def recorded(self, state: dict[Tensor, Any]) -> Iterator[None]:
        """Record which entries of `state` change inside. If that raises, undo it in place."""
        before = _entries(state)
        try:
            yield
        except BaseException:
            self._undo_(_changes(before, state), state)
            raise
        self._changes += _changes(before, state)

    @contextmanager
    def undone_on_error_(self, state: dict[Tensor, Any]) -> Iterator[None]:
        """If what runs inside raises, undo in place what was recorded of `state`; if not, forget it."""
        try:
            yield
        except BaseException:
            self._undo_(self._changes, state)
            raise
        finally:
            self.forget()

    def forget(self) -> None:
        """Keep nothing of what was recorded."""
        self._changes.clear()

    def _undo_(self, changes: Sequence[_Change], state: dict[Tensor, Any]) -> None:
        """Bring the entries of `state` back to what they were, except those that somebody has changed since."""
        for p, before, after, versions in reversed(changes):
            now = state.get(p)
            if not _are_same(now, after) or _versions(now) != versions:
                continue
            if before is None:
                del state[p]
            else:
                entry = state.setdefault(p, {})
                entry.clear()
                entry.update(before)
                self.away.pop(p, None)


def _changes(before: Mapping[Tensor, Entry], state: Mapping[Tensor, Any]) -> list[_Change]:
    """Return how the entries of `state` differ from those that were there before."""
    after = _entries(state)
    pairs = ((p, before.get(p), after.get(p)) for p in {**before, **after})
    return [_Change(*each, _versions(each[-1])) for each in pairs if not _are_same(*each[1:])]


def _entries(state: Mapping[Tensor, Any]) -> dict[Tensor, Entry]:
    """Return copies of the entries, which have the same tensors."""
    return {p: dict(entry) for p, entry in state.items() if isinstance(p, Tensor) and isinstance(entry, dict)}


def _versions(entry: Optional[Entry]) -> list[int]:
    tensors = [local_part(value) for value in (entry or {}).values() if isinstance(value, Tensor)]
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def _are_same(one: Optional[Entry], other: Optional[Entry]) -> bool:
    """Return whether two entries have the same objects."""
    if one is None or other is None:
        return one is other
    return one.keys() == other.keys() and all(one[key] is other[key] for key in one)
