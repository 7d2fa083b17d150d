"""Muon: momentum, orthogonalized, for the matrices; AdamW for the rest; one `torch.optim.Optimizer`."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Optional, Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .clipping import Clipping
from .distributed.exchange_plan import Sharing
from .distributed.pipeline import update_batch_, zero_part
from .distributed.placement import check_gradient_layout, local_part, ranks_of
from .explanation import explanation_of
from .learning_rate import Adjustment
from .param_groups import names_of, plain_settings
from .parameters import UNSCALED, GradientScaling, check_gradient
from .planned_optimizer import PlannedOptimizer
from .routing import Explanation, IsMuon
from .telemetry import NOTHING, Seen, fallback_update_norm, gradient_norms, seen_scaling, update_metrics
from .updates import Given, recipe_of, scale_rows_, update_fallback_, update_matrices_


class Muon(PlannedOptimizer):
    """Muon for matrices and AdamW for every other parameter.

    One step of a rows x cols matrix W with gradient G, of the group's settings:

        M <- momentum * M + (1 - momentum) * G
        D  = momentum * M + (1 - momentum) * G  if nesterov else  M
        W <- W * (1 - lr * weight_decay) - lr * multiplier(rows, cols) * orthogonalize(D)

    Args:
        params: tensors, `(name, tensor)` pairs such as `model.named_parameters()`, or group dicts of either. A group
            that holds both kinds becomes two neighbours, so that each has one live `lr`. Group keys: every argument
            up to `offload` except `is_muon`; `use_muon` or its opposite `use_fallback` (absent: decided by
            routing); `split_rows`, the row counts of weights that are several in one, such as queries, keys, values.
        lr: step size in units of the multiplier; a float or a 0-d tensor, read at every step.
        weight_decay: of every parameter of the group; a float or a 0-d tensor, read at every step.
        momentum: beta of the average of gradients.
        nesterov: look one step ahead.
        ns_coefficients: a preset of `schedules.PRESETS`, one `(a, b, c)` or a sequence of them.
        eps: a matrix is divided by max(norm, eps); 0 makes the update free of the gradient's scale.
        ns_steps: steps of the iteration.
        adjust_lr_fn: `match_rms_adamw` (updates as large as AdamW's), `original` (spectral norm; also None),
            `rms_to_rms`, or a function of a matrix's rows and columns.
        ns_dtype: dtype of the iteration, a torch.dtype or its name; None: `iteration.default_work_dtype`.
        ns_method: `standard`, `gram`, `gram_float32`, or `auto`, the cheaper where both are safe (`orthogonalize`).
        decay_mode: of matrices: `decoupled`; `independent` of lr, W * (1 - weight_decay); `cautious`, decoupled and
            only where it goes the way of the update. The fallback's decay is decoupled.
        maximize: ascend.
        conv_mode: a convolution (out, in, *kernel) is a matrix (out, in * positions), `flatten`, or one (out, in) for
            each position of its kernel, `batched`, whose steps `normalize_spatial` divides by sqrt(positions).
        expert_keys: components of names, such as `experts`, whose parameters (E, rows, cols) are E matrices.
        is_muon: `(name, parameter) -> True, False or None`, where None leaves the decision to routing.
        fallback: `adamw` or `nadamw`, AdamW with Nesterov's momentum, for what is no matrix.
        adamw_lr: `lr` of the fallback's groups that bring none of their own; None: `lr`.
        adamw_betas, adamw_eps: of the fallback.
        stochastic_rounding: round half-precision matrices up or down at random, without bias.
        momentum_dtype: of momentum buffers that are made; None: the parameter's.
        offload: keep momentum buffers in host memory, pinned for a GPU, which has those of two batches at a time; read
            them through `state_dict()`, which waits for them. Not with `capturable`, nor for matrices of several ranks.
        qk_clip: settings of QK-clip (`attention.clip_settings`; also `report`, called with the counts of clipped and of
            not finite heads one step later), for which `observe_qk_logits` is to be called in the forward pass.
        process_group: ranks that each hold a copy of every plain parameter, as under DDP: they share the work.
        chunk_bytes: of directions that a rank holds for each chunk of exchanged matrices; None: 256 MiB.
        chunks_in_flight: how many chunks may be on their way while one is worked on; more than two are of no use.
        release_grads: set `.grad` of a matrix to None as soon as it has been read.
        sum_gram: where a matrix lies in parts along its long side, and that costs less, sum its Gram matrix over the
            ranks instead of sending the parts to an owner; updates are rounded otherwise. `explain()` says where.
        capturable: the step may be captured in a CUDA graph; numbers in groups are captured as they are, and tensors
            on the GPU read.

    State: `momentum_buffer` for matrices; `step`, `exp_avg`, `exp_avg_sq` for the rest; made at construction.
    Raises ValueError or TypeError for settings that cannot work, before anything is changed.
    """

    _kept = (*PlannedOptimizer._kept, "_clipping")
    _seen = NOTHING
    # GradScaler then passes `grad_scale` and `found_inf` on, for which nobody waits.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params,
        lr: float | Tensor = 1e-3,
        weight_decay: float | Tensor = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients="polar_express",
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Adjustment = "match_rms_adamw",
        *,
        ns_dtype: torch.dtype | str | None = None,
        ns_method: str = "auto",
        decay_mode: str = "decoupled",
        maximize: bool = False,
        conv_mode: str = "flatten",
        normalize_spatial: bool = True,
        expert_keys: Sequence[str] = (),
        is_muon: Optional[IsMuon] = None,
        fallback: str = "adamw",
        adamw_lr: float | Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        stochastic_rounding: bool = False,
        momentum_dtype: torch.dtype | str | None = None,
        offload: bool = False,
        qk_clip: Optional[Mapping[str, Any]] = None,
        capturable: bool = False,
        process_group: Optional[ProcessGroup] = None,
        chunk_bytes: Optional[int] = None,
        chunks_in_flight: int = 2,
        release_grads: bool = False,
        sum_gram: bool = False,
    ):
        settings = dict(
            lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, ns_coefficients=ns_coefficients,
            eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn, ns_dtype=ns_dtype, ns_method=ns_method,
            decay_mode=decay_mode, maximize=maximize, conv_mode=conv_mode, normalize_spatial=normalize_spatial,
            expert_keys=expert_keys, split_rows=None, fallback=fallback, adamw_betas=adamw_betas, adamw_eps=adamw_eps,
            stochastic_rounding=stochastic_rounding, momentum_dtype=momentum_dtype, offload=offload,
            capturable=capturable, rounding_step=0,
        )  # fmt: skip
        plain = plain_settings({**settings, "adamw_lr": adamw_lr})
        self._clipping = None if qk_clip is None else Clipping(qk_clip)
        adamw_lr = plain.pop("adamw_lr")
        ranks = ranks_of(process_group)
        sharing = Sharing(ranks, chunk_bytes, chunks_in_flight, release_grads, sum_gram).checked()
        super().__init__(params, plain, is_muon, adamw_lr, sharing)

    # A training function that is compiled breaks its graph here: the tracer does not take torch's fused AdamW.
    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None):
        """Update every parameter that has a gradient, and return what `closure`, called first if given, returns.

        Parameters and state change in place; gradients do not. Raises ValueError before anything is changed for
        gradients that are sparse, and for parameters whose shape is no longer that of their state; RuntimeError while
        a CUDA graph is captured, for what it would not repeat, and if ranks had different settings in the last step.
        """
        self._check_capture()
        self._check_accords()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refresh()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                check_gradient(p)
                check_gradient_layout(p)
        self._agree()
        scalings, accords = self._plan.agree(self._scaling())
        scales = {} if self._clipping is None else self._clipping.scales()
        given = Given(self.state, scales, scalings, accords, self._sharing.release_grads)
        batches = update_matrices_(self._plan, given, self._sharing.chunks_in_flight)
        rest = [group for group in self.param_groups if not group["use_muon"]]
        groups = [update_fallback_(group, self._plan, given) for group in rest]
        self._seen = Seen(batches, groups, seen_scaling(scalings.values()))
        self._accords = tuple(accords.values())
        for accord in accords.values():
            accord.close()
        for group in self.param_groups:
            group["rounding_step"] += group["stochastic_rounding"]
        for p in scales.keys() - {p for p, *_ in self._plan.matrices if p in self.state}:  # biases and frozen weights
            scale_rows_(p, self._plan, given)
        return loss

    def observe_qk_logits(self, layer: str | int, logits: Tensor) -> None:
        """Note the largest attention logits (..., heads) of one layer since the last step, for QK-clip.

        They are the ones before the softmax, scaled as it sees them, -inf for heads that only other ranks have; the
        device is not waited for. Raises ValueError without `qk_clip`, for a layer that there is none of, and for
        another number of heads.
        """
        if self._clipping is None:
            raise ValueError("observe_qk_logits needs Muon(..., qk_clip={...})")
        self._clipping.observe_(layer, logits)

    def metrics(self) -> dict[str, Tensor]:
        """Return what the last step saw, as 0-d tensors: reading one is what waits for the device.

        `matrices`, `matrices_not_finite`, norm and root mean square of their updates, and of `qk_clip` the heads
        clipped and not finite. The norm of the fallback's updates follows from its state, and the gradient norms of
        both branches from the gradients that are still there, at this call. Where several ranks share parameters, it is
        of what this rank has worked on and holds, be it a copy or a part, and no other rank is asked.
        """
        found = {**update_metrics(self._seen.batches), **fallback_update_norm(self._seen, self.state)}
        found.update(gradient_norms(self.param_groups, self._seen.scaling.grad_scale))
        if self._clipping is not None and self._clipping.counts is not None:
            found["heads_clipped"], found["heads_not_finite"] = self._clipping.counts.unbind()
        return found

    def explain(self) -> Explanation:
        """Return each parameter's branch, the reason, its multiplier and the products it runs on; print it."""
        self._refresh()
        return explanation_of(self.param_groups, self._plan, self._reasons)

    def warmup(self, progress: Optional[Callable[[int, int, str], None]] = None) -> None:
        """Compile every kernel that the parameters need, on matrices of zeros; nothing of the optimizer changes.

        `progress(done, total, what)` is called after each; None prints a line.
        """
        self._refresh()
        kinds = {(b.rows, b.cols, b.packed_dtype, b.iteration): b for b in self._plan.all_batches()}
        for done, batch in enumerate(kinds.values(), 1):
            p, group, _ = self._plan.matrices[batch.members[0].parameter]
            parts = [zero_part(batch.rows, batch.cols, local_part(p)) for _ in batch.members]
            update_batch_(batch, parts, recipe_of([group], UNSCALED))
            what = f"{len(batch.members)} x {batch.rows} x {batch.cols} {batch.iteration}"
            (progress or _print_progress)(done, len(kinds), what)

    def _scaling(self) -> GradientScaling:
        """Return what GradScaler says."""
        found_inf = getattr(self, "found_inf", None)
        # An int where nothing had a gradient on this rank.
        return GradientScaling(getattr(self, "grad_scale", None), found_inf if isinstance(found_inf, Tensor) else None)

    def _claim_of_all(self) -> str:
        return f"{super()._claim_of_all()}, {self._clipping or 'no qk_clip'}"

    def _refresh(self) -> bool:
        changed = super()._refresh()
        if changed and self._clipping is not None:
            named = [(name, p) for group in self.param_groups for name, p in zip(names_of(group), group["params"])]
            self._clipping.follow(*zip(*named), self._sharing.ranks)
        return changed

    def _check_capture(self) -> None:
        if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
            return
        if self._plan.claims:
            raise RuntimeError("a step of parameters that several ranks share cannot be captured in a CUDA graph")
        if not all(group["capturable"] for group in self.param_groups):
            raise RuntimeError("a step can be captured in a CUDA graph only with Muon(..., capturable=True)")
        live = [group[key] for group in self.param_groups for key in ("lr", "weight_decay")]
        if any(isinstance(value, Tensor) and value.device.type == "cpu" for value in live):
            raise RuntimeError("lr and weight_decay on the CPU cannot be read by a captured step: put them on the GPU")
        if self._clipping is not None and self._clipping.reports:
            raise RuntimeError("a captured step calls no report of qk_clip: read metrics() instead")


def _print_progress(done: int, total: int, what: str) -> None:
    print(f"warm-up {done}/{total}: {what}", flush=True)
