"""Muon: momentum, orthogonalized, for the matrices; AdamW for the rest; one `torch.optim.Optimizer`."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Optional, Sequence

import torch
from torch import Tensor

from .clipping import Clipping
from .distributed.pipeline import Part, update_batch_
from .learning_rate import Adjustment
from .param_groups import names_of, plain_settings
from .parameters import UNSCALED, GradientScaling, check_gradient
from .planned_optimizer import PlannedOptimizer
from .routing import Explanation, IsMuon, Route, muon_route
from .state import ensure_state
from .telemetry import Seen, gradient_norms, update_metrics
from .updates import recipe_of, scale_rows_, update_fallback_, update_matrices_


class Muon(PlannedOptimizer):
    """Muon for matrices and AdamW for every other parameter.

    One step of a rows x cols matrix W with gradient G, of the group's settings:

        M <- momentum * M + (1 - momentum) * G
        D  = momentum * M + (1 - momentum) * G  if nesterov else  M
        W <- W * (1 - lr * weight_decay) - lr * multiplier(rows, cols) * orthogonalize(D)

    Args:
        params: tensors, `(name, tensor)` pairs such as `model.named_parameters()`, or group dicts of either. A group
            that holds both kinds becomes two neighbours, so that each has one live `lr`. Group keys: every argument
            up to `momentum_dtype` except `is_muon`; `use_muon` or its opposite `use_fallback` (absent: decided by
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
        qk_clip: settings of QK-clip (`attention.clip_settings`; also `report`, called with the counts of clipped and of
            not finite heads one step later), for which `observe_qk_logits` is to be called in the forward pass.
        capturable: the step may be captured in a CUDA graph; numbers in groups are captured as they are, tensors read.

    State: `momentum_buffer` for matrices; `step`, `exp_avg`, `exp_avg_sq` for the rest; made at construction.
    Raises ValueError or TypeError for settings that cannot work, before anything is changed.
    """

    _kept = (*PlannedOptimizer._kept, "_clipping")
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
        qk_clip: Optional[Mapping[str, Any]] = None,
        capturable: bool = False,
    ):
        settings = dict(
            lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, ns_coefficients=ns_coefficients,
            eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn, ns_dtype=ns_dtype, ns_method=ns_method,
            decay_mode=decay_mode, maximize=maximize, conv_mode=conv_mode, normalize_spatial=normalize_spatial,
            expert_keys=expert_keys, split_rows=None, fallback=fallback, adamw_betas=adamw_betas, adamw_eps=adamw_eps,
            stochastic_rounding=stochastic_rounding, momentum_dtype=momentum_dtype, capturable=capturable,
            rounding_step=0,
        )  # fmt: skip
        plain = plain_settings({**settings, "adamw_lr": adamw_lr})
        self._clipping = None if qk_clip is None else Clipping(qk_clip)
        self._seen: list[Seen] = []
        adamw_lr = plain.pop("adamw_lr")
        super().__init__(params, plain, is_muon, adamw_lr)

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None):
        """Update every parameter that has a gradient, and return what `closure`, called first if given, returns.

        Parameters and state change in place; gradients do not. Raises ValueError before anything is changed for
        gradients that are sparse, and for parameters whose shape is no longer that of their state; RuntimeError while
        a CUDA graph is captured, unless every group is `capturable`.
        """
        self._check_capture()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refresh()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                check_gradient(p)
                if p not in self.state:  # frozen at construction, with a gradient all the same
                    ensure_state(self.state[p], p, group)
        scaling = GradientScaling(getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        scales = {} if self._clipping is None else self._clipping.scales()
        matrices = [(p, group, view) for (p, group), view in zip(self._matrices, self._views)]
        self._seen = update_matrices_(self._batches, matrices, self.state, scales, scaling)
        done = {p for p, _ in self._matrices if p.grad is not None}
        for group in self.param_groups:
            group["rounding_step"] += group["stochastic_rounding"]
            if not group["use_muon"]:
                update_fallback_(group, self.state, scaling)
        for p in scales.keys() - done:  # such as biases, and weights that had no gradient
            scale_rows_(p, scales[p], scaling)
        return loss

    def observe_qk_logits(self, layer: str | int, logits: Tensor) -> None:
        """Note the largest attention logits (..., heads) of one layer since the last step, for QK-clip.

        They are the ones before the softmax, scaled as it sees them; the device is not waited for. Raises ValueError
        without `qk_clip`, for a layer that there is none of, and for another number of heads.
        """
        if self._clipping is None:
            raise ValueError("observe_qk_logits needs Muon(..., qk_clip={...})")
        self._clipping.observe_(layer, logits)

    def metrics(self) -> dict[str, Tensor]:
        """Return what the last step saw, as 0-d tensors: reading one is what waits for the device.

        `matrices`, `matrices_not_finite`, norm and root mean square of their updates, and of `qk_clip` the heads
        clipped and not finite. Gradient norms of both branches are taken now, of the gradients that are still there.
        """
        found = {**update_metrics(self._seen), **gradient_norms(self.param_groups)}
        if self._clipping is not None and self._clipping.counts is not None:
            found["heads_clipped"], found["heads_not_finite"] = self._clipping.counts.unbind()
        return found

    def explain(self) -> Explanation:
        """Return each parameter's branch, the reason, its multiplier and the products it runs on; print it."""
        self._refresh()
        iterations = {member.parameter: str(batch.iteration) for batch in self._batches for member in batch.members}
        muons = iter(zip(self._views, map(iterations.get, range(len(self._views)))))
        rows = []
        for group in self.param_groups:
            for name, p in zip(names_of(group), group["params"]):
                # A parameter that a wrapper has put in another's place was not routed: its group says where it is.
                reason = self._reasons.get(p, "use_muon")
                if group["use_muon"]:
                    view, iteration = next(muons)
                    rows.append(muon_route(name, p, reason, view, group["adjust_lr_fn"], iteration))
                else:
                    kernel = "torch._fused_adamw_" if group["fallback"] == "adamw" else "torch._foreach_*"
                    rows.append(Route(name, tuple(p.shape), group["fallback"], reason, 0, None, None, kernel))
        return Explanation(rows)

    def warmup(self, progress: Optional[Callable[[int, int, str], None]] = None) -> None:
        """Compile every kernel that the parameters need, on matrices of zeros; nothing of the optimizer changes.

        `progress(done, total, what)` is called after each; None prints a line.
        """
        self._refresh()
        kinds = {(b.rows, b.cols, b.packed_dtype, b.iteration): b for b in self._batches}
        for done, batch in enumerate(kinds.values(), 1):
            p, group = self._matrices[batch.members[0].parameter]
            zeros = torch.zeros(3, len(batch.members), batch.rows, batch.cols, dtype=p.dtype, device=p.device)
            parts = [Part(*matrix) for matrix in zeros.unbind(1)]
            update_batch_(batch, parts, recipe_of([group], UNSCALED))
            what = f"{len(batch.members)} x {batch.rows} x {batch.cols} {batch.iteration}"
            (progress or _print_progress)(done, len(kinds), what)

    def _refresh(self) -> bool:
        changed = super()._refresh()
        if changed and self._clipping is not None:
            named = [(name, p) for group in self.param_groups for name, p in zip(names_of(group), group["params"])]
            self._clipping.follow(*zip(*named))
        return changed

    def _check_capture(self) -> None:
        if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
            return
        if not all(group["capturable"] for group in self.param_groups):
            raise RuntimeError("a step can be captured in a CUDA graph only with Muon(..., capturable=True)")


def _print_progress(done: int, total: int, what: str) -> None:
    print(f"warm-up {done}/{total}: {what}", flush=True)
