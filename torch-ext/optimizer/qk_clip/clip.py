"""QK-clip: scales down rows of query and key weights, head by head, if their attention logits have grown too large.

If the largest logit of a head exceeds the threshold, gamma = threshold / largest, else 1. For example, with threshold
100 and a largest logit of 400, gamma is 0.25; with alpha 0.5 query and key rows are then each halved. `heads` decides
which power of gamma scales which rows. Everything stays on the device, and all layers are computed together.

Source: Kimi Team, Kimi K2, arXiv:2507.20534, section 2.1 and algorithm 1.
"""

from __future__ import annotations

from typing import Any, Callable, Collection, Hashable, Mapping, Optional, Sequence

import torch
from torch import Tensor

from ..iteration import DTYPES
from ..kernels.formats import exact_dtype, is_dtensor
from ..kernels.host_copy import HostCopy, moved
from ..kernels.user_warnings import warn_user
from ..parameters.names import repeated
from ..plan.layout import layout_of
from ..plan.process_groups import Ranks, all_reduce_max_, this_rank, world_size
from ..rules.scaling import Scalings
from .heads import Attention, attentions, clip_settings
from .weights import Layer, without_positions

# After so many steps without any observed logits there is a warning. Checkpoint tools take fewer steps to create state,
# and so do loops that observe logits every few steps.
UNOBSERVED_STEPS = 10


class QKClip:
    """QK-clip for an optimizer's parameters by `settings`: those of `heads.clip_settings`, and `report`.

    `report(clipped, not_finite)` receives the counts of heads of one step when the next one begins. That waits for
    these counts alone, which are on their way since the last step, and not for what the device was given after it.
    """

    def __init__(self, settings: Mapping[str, Any]):
        self.settings = clip_settings(settings)
        self.report: Optional[Callable[[int, int], None]] = settings.get("report")
        if self.report is not None and not callable(self.report):
            raise TypeError(f"report of qk_clip must be a function of two counts, or None, got {self.report!r}")
        self._parameters: dict[str, Tensor] = {}
        self.devices: set[torch.device] = set()  # of the weights when the plan was made
        self._attentions: list[Attention] = []
        self._ranks: Optional[Ranks] = None  # that share the weights
        self._is_here = True  # whether this rank is one of them
        self._largest: Optional[Tensor] = None  # the largest logit of every head, as `_allocate` describes it
        self._warned = False  # of replicas whose logits nobody compares
        self._unobserved: Optional[int] = 0  # steps so far; None from the first observation on
        self.counts: Optional[Tensor] = None  # int64 (2): heads clipped at the last step, and heads not finite
        self._unreported: Optional[HostCopy] = None  # counts that were not given to `report`

    def replace_positions(self, names: Sequence[str]) -> None:
        """Put names in place of the positions in `layers`; `names` are the parameters' names in the user's order.

        Raises ValueError for a position that no parameter has.
        """
        if self.settings.layers is not None:
            self.settings = self.settings._replace(layers=without_positions(self.settings.layers, names))

    def follow(self, names: Sequence[str], parameters: Sequence[Tensor], replica_ranks: Optional[Ranks] = None) -> None:
        """Find the attentions of these parameters. Observed logits of those that were there before are kept.

        `replica_ranks` each have a copy of every plain parameter. Logits that any rank has observed count. Raises
        ValueError if there are no attentions, if they are on several groups of ranks, or if two parameters have the
        name of one of their weights.
        """
        self._parameters = dict(zip(names, parameters))
        layers = attentions(self.settings, {name: tuple(p.shape) for name, p in self._parameters.items()})
        weights = {name: self._parameters[name] for attention in layers for name in attention.weights}
        twice = [name for name in repeated(names) if name in weights]
        if twice:
            raise ValueError(
                f"qk_clip finds weights by their names, and several parameters have the names {twice}: give them "
                "different names, or let each model have an optimizer with a qk_clip of its own"
            )
        layouts = [layout_of(name, weight, replica_ranks) for name, weight in weights.items()]
        meshes = {layout.mesh.members for layout in layouts if layout is not None}
        if len(meshes) > 1:
            got = f"queries and keys are on {len(meshes)} groups of ranks, {sorted(meshes)}"
            raise ValueError(f"QK-clip needs all its layers on the same ranks: {got}")
        self._ranks = next(iter(meshes), None)
        if self._ranks is None and world_size() > 1 and not self._warned:
            self._warned = True
            warn_user(
                f"qk_clip sees the attention logits of rank {this_rank()} alone, and there are {world_size()} ranks: "
                "if they have replicas of one model, as under DistributedDataParallel, these will drift apart. For "
                "replicas write exchange=ExchangeOptions(process_group=...) with the group of their ranks"
            )
        self._is_here = self._ranks is None or this_rank() in self._ranks
        self.devices = {weight.device for weight in weights.values()}
        device, seen = next(iter(weights.values())).device, self._largest
        if seen is None or layers != self._attentions or seen.device != device:
            before, self._attentions = self._attentions, layers
            self._allocate(device)
            if seen is not None and not seen.is_meta:  # on meta nothing was observed
                self._keep_logits(before, seen)

    def check_rows(self, transposed: Collection[str]) -> None:
        """Raise ValueError if one of the weights is `transposed`, because then its heads are columns."""
        names = [name for name in self._rows if name in transposed]
        if names:
            raise ValueError(
                f"qk_clip scales heads that are rows, but those of transposed weights are columns: {names}"
            )

    def observe_(self, layer: Layer, logits: Tensor) -> None:
        """Raise the largest logits seen so far of one layer, in place, to `logits` (..., heads) where these are larger.

        `logits` are each head's largest logits before the softmax, with the scale that the softmax sees, or upper
        bounds of them such as log-sum-exps. They may be on any device; the host waits only if they are not on the CPU
        and the first weight is. A NaN stays until the next good step. Raises ValueError for an unknown layer and for
        another number of heads; TypeError for another kind of numbers, for sparse ones and for a DTensor.
        """
        attention = self._by_key.get(layer) if isinstance(layer, Hashable) else None
        if attention is None:
            raise ValueError(f"qk_clip has no layer {layer!r}, only {', '.join(map(repr, self._by_key))}")
        heads = attention.heads
        if logits.shape[-1:] != (heads,):
            may_share = attention.is_fused and not self.settings.num_kv_heads
            advice = ". If heads of the fused weight share keys, qk_clip needs num_kv_heads" if may_share else ""
            if logits.ndim > 2:
                advice = f". Give the largest logit of each head: logits.amax((-2, -1)){advice}"
            raise ValueError(f"logits of layer {layer!r} must be (..., {heads}), got {tuple(logits.shape)}{advice}")
        if is_dtensor(logits):
            raise TypeError(f"logits of layer {layer!r} must be a plain tensor, got a DTensor: write .full_tensor()")
        if logits.dtype not in DTYPES or logits.layout != torch.strided:
            raise TypeError(
                f"logits of layer {layer!r} must be a dense tensor of {', '.join(map(str, DTYPES))}, "
                f"got {logits.dtype} in {logits.layout}"
            )
        self._unobserved = None
        if logits.numel():
            largest = self._largest[attention.first : attention.first + heads]
            seen = logits.detach().reshape(-1, heads).amax(0).to(largest.dtype)
            torch.maximum(largest, moved(seen, largest.device), out=largest)

    def forget(self) -> None:
        """Forget observed logits, and report no counts of the last step: weights and state are about to be replaced."""
        self._unreported = None
        if self._largest is not None:
            self._largest.fill_(-torch.inf)

    def begin_step(self) -> None:
        """Give the counts of the last step to `report`, and warn if nothing was ever observed: before anything changes.

        Either may raise.
        """
        self._count_unobserved()
        if self._unreported is not None:
            self.report(*self._unreported.read())
        self._unreported = None

    def take_scales(self, scalings: Scalings) -> dict[Tensor, Tensor]:
        """Return the float32 factor of each row of the weights and biases that QK-clip may scale, on their devices.

        The factors follow from the logits observed since the last good step, and are computed in the device's
        `exact_dtype`. The logits are then forgotten, since changed weights have other logits. A head with a NaN or an
        infinity keeps its rows, because no factor follows from such a logit, and a factor of 0 would kill the head;
        `counts` has it. If gradients overflowed, as `scalings` say, no weight changes: no head counts as clipped, and
        logits are kept, as where GradScaler leaves out the call of `step`. On ranks that have none of these weights the
        result is empty.
        """
        largest, threshold = self._largest, self.settings.threshold
        if not self._is_here:
            return {}
        if self._ranks is not None:
            # NaN becomes infinity, which is not finite either: a maximum over ranks may lose a NaN.
            largest.nan_to_num_(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
            all_reduce_max_(largest, self._ranks, "attention logits")
        clipped = (largest > threshold) & largest.isfinite()
        found_inf = scalings.on(self._ranks, largest.device).found_inf
        always = torch.ones((), dtype=torch.bool, device=largest.device)
        is_taken = always if found_inf is None else found_inf.reshape(()) == 0
        self.counts = torch.stack([clipped.sum() * is_taken, (largest.isnan() | largest.isposinf()).sum()])
        gamma = (threshold / largest.to(self._exponents.dtype)).masked_fill(~clipped, 1.0)
        of_runs = gamma[self._heads_of_run].amin(1).pow(self._exponents).float()
        of_rows, sizes = of_runs[self._run_of_row], list(self._rows.values())
        scales = {device: moved(of_rows, device).split(sizes) for device in self.devices}
        largest.masked_fill_(is_taken, -torch.inf)
        self._unreported = None if self.report is None else HostCopy(self.counts)
        weights = [self._parameters[name] for name in self._rows]
        return {weight: scales[weight.device][i] for i, weight in enumerate(weights)}

    def _count_unobserved(self) -> None:
        """Warn, once, if nothing has been observed in the first `UNOBSERVED_STEPS`: then nothing is ever clipped."""
        if self._unobserved is None or not self._is_here:
            return
        self._unobserved += 1
        if self._unobserved == UNOBSERVED_STEPS:
            warn_user(
                f"qk_clip was given, and no attention logits have been observed in {UNOBSERVED_STEPS} steps, so "
                "nothing is clipped: call optimizer.observe_qk_logits(layer, logits) in the forward pass, or leave "
                "qk_clip out"
            )

    def _keep_logits(self, before: Sequence[Attention], seen: Tensor) -> None:
        """Copy the logits `seen` of the attentions `before` to where those of the same names now have theirs."""
        known = {a.keys[0]: a for a in before}  # another key, the last number in the name, may change hands
        for a in self._attentions:
            old = known.get(a.keys[0])
            if old is not None and old.heads == a.heads:
                self._largest[a.first : a.first + a.heads].copy_(seen[old.first : old.first + old.heads])

    def _allocate(self, device: torch.device) -> None:
        """Make the tensors that a step needs for `self._attentions` on `device`, with nothing observed."""
        self._by_key = {key: attention for attention in self._attentions for key in attention.keys}
        weights = [(name, runs, a.first) for a in self._attentions for name, runs in a.weights.items()]
        self._rows = {name: sum(run.rows for run in runs) for name, runs, _ in weights}
        runs = [run for _, runs, _ in weights for run in runs]
        heads = [[first + head for head in run.heads] for _, runs, first in weights for run in runs]
        # Runs with fewer heads are padded with an extra index, which belongs to no head and never has logits.
        no_head, width = sum(a.heads for a in self._attentions), max(1, *map(len, heads))
        heads = [row + [no_head] * (width - len(row)) for row in heads]
        rows = torch.tensor([run.rows for run in runs], device="cpu")
        self._largest = torch.full((no_head + 1,), -torch.inf, dtype=torch.float32, device=device)
        self._heads_of_run = torch.tensor(heads, dtype=torch.int64, device=device)  # (runs, most heads of a run)
        exponents = [run.exponent for run in runs]
        self._exponents = torch.tensor(exponents, dtype=exact_dtype(device), device=device)  # (runs)
        self._run_of_row = torch.repeat_interleave(rows).to(device)  # one entry for each row of all weights
