"""Muon: orthogonalized momentum for matrices and AdamW for the rest, as one `torch.optim.Optimizer`.

This file exceeds the budget because a `torch.optim.Optimizer` is one class: the methods that torch calls are easiest to
read in one place. The modules that it imports do the work.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any, Callable, Mapping, Optional, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from .explain.brief import brief
from .explain.routes import explanation_of
from .explain.table import Explanation
from .kernels.autocast import autocasts, without_autocast
from .kernels.user_warnings import warn_user
from .learning_rate import UPDATE_RMS, Adjustment
from .parameters.advice import advice, idle_adamw_arguments, idle_is_muon, idle_keys, routed, same_names, told_names
from .parameters.argument_checks import (
    check_closure,
    check_is_dict,
    check_state_dict,
    params_as_list,
    with_known_arguments,
)
from .parameters.checkpoints import as_saved, checked, loaded_groups, unbox_
from .parameters.groups import saved_group, split_group
from .parameters.matrices import EXPERT_KEYS
from .parameters.names import named_parameters
from .parameters.rates import fast_decay
from .parameters.routing import IsMuon, check_is_muon
from .parameters.setting_values import flag
from .parameters.settings import OF_GROUPS, SETTINGS, plain_settings
from .parameters.synonyms import check_implementations
from .plan.exchange_options import ExchangeOptions, idle_exchange
from .plan.plain_parts import plain_parts
from .plan.plan import Plan
from .plan.process_groups import ranks_of
from .qk_clip.clip import QKClip
from .rules.scaling import GradientScaling, Scalings
from .step.agreement.copies import check_copies
from .step.agreement.rank_agreement import RankAgreement
from .step.agreement.rank_tuning import measure_stages, to_measure
from .step.agreement.unread_meetings import check_last_meeting, read_all
from .step.capture import check_capture, check_captured_plan, is_capturing
from .step.change import Change
from .step.fallback import update_fallback_
from .step.finish import UpdateNorms
from .step.first_steps import FirstSteps
from .step.gradients import Gradients, check_gradients, layouts_of, redistribute_
from .step.graphs import UpdateGraphs
from .step.interrupts import interrupted_at_the_end
from .step.master_weights import load_master_weights, master_weights
from .step.metrics import gradient_norms, update_metrics
from .step.plan_cache import PlanCache
from .step.recipe import StepContext, snapshot
from .step.state import checked_parameters, copy_loaded_
from .step.traced import handle_of, is_traceable, traced_step
from .step.update import scale_other_rows_, update_matrices_
from .step.warmup import compile_stages, connect_stages, warm_up
from .tuning.progress import Line, Progress
from .tuning.tune import Tuner, check_call


class Muon(Optimizer):
    """Muon for matrices and AdamW (or NAdamW, the `fallback`) for every other parameter.

    One step of a rows x cols matrix W with gradient G, with the settings of its group:

        M <- momentum * M + (1 - momentum) * G
        D  = momentum * M + (1 - momentum) * G  if nesterov else  M
        W <- W * (1 - lr * weight_decay) - lr * multiplier(rows, cols) * orthogonalize(D)

    Args:
        params: tensors, `(name, tensor)` pairs such as `model.named_parameters()`, or group dicts of either. Without
            names an embedding looks like any other matrix. A group with parameters of both kinds is split into two
            neighbouring groups with the same live `lr` (`adamw_lr` says when they differ).
        lr: learning rate of all parameters, a float or a float32 or float64 tensor with one element, read at every
            step. Both halves of a split group share a tensor, so change it once, not for each group; under
            `ReduceLROnPlateau`, and under schedulers that get a list of values, let `lr` be a number. In a tensor on a
            GPU a NaN or a negative number is not noticed. Start with 0.02 for a small model from random weights, and
            with AdamW's rate for a large one (docs/learning_rates.md).
        weight_decay: decay of every parameter of the group, like `lr` a float or a tensor, read at every step.
        momentum: decay rate (beta) of the running average of gradients.
        nesterov: use Nesterov momentum.
        ns_coefficients: coefficients of the Newton-Schulz iteration: `polar_express`, `polar_express_safer`, `quintic`,
            `original` (Keller Jordan's), `deepseek_v4` (needs `ns_steps=10`), one `(a, b, c)`, or a sequence of them.
            Of a sequence the first `ns_steps` count; in a shorter one the last is repeated. `schedules.py` has the
            sources.
        eps: a matrix is divided by the larger of its Frobenius norm and `eps` first. With 0 the update does
            not depend on the gradient's scale, as long as its norm is above 1.2e-38 (2.2e-308 in float64).
        ns_steps: number of steps of the iteration.
        adjust_lr_fn: what `lr` is multiplied by for a matrix: `match_rms_adamw` (updates have the size of AdamW's),
            `original` (Keller Jordan's; None means the same), `rms_to_rms` (timm's name; torch's `spectral_unclamped`
            means the same), or a function of the matrix's rows and columns.
        use_addmm: torch's choice between implementations. It changes nothing here.
        foreach, fused: torch's choices between implementations; leave them out. None and False change nothing, and True
            raises. One exception: the dict of a group that the fallback alone updates may have `fused=True`, because
            its kernel is fused. In a group that is made already they have no effect.
        update_rms: root mean square of an update with `match_rms_adamw` at `lr` 1, for matrices that lack no direction:
            0.2, or 0.18 as in DeepSeek-V4. Gradients of low rank give less. Beside another `adjust_lr_fn` a value that
            is not the default raises ValueError.
        ns_dtype: dtype of the iteration, a torch.dtype or its name. None: float64 for float64 matrices, else float16 on
            CUDA devices, bfloat16 on CPUs that multiply it faster than float32, and float32 elsewhere.
        ns_method: how the iteration is computed: `standard`, `gram` (on the small Gram matrix), `gram_float32` (keeps
            that matrix in float32), or `auto`: the fastest that is safe in half precision, and in float32 where that is
            a CPU's default; `standard` in every other float32, and in float64.
        equalize: divide each row or column of a matrix by its norm before the iteration: `rows`, `columns`,
            `rows_columns` (rows first), `columns_rows`, or `none` (MuonEq, arXiv:2603.28254). `experimental_aurora`
            scales the rows of a tall matrix, or the columns of a wide one, so that those of the result have nearly
            equal norms, at twice the cost (arXiv:2606.27715).
        renormalize: rescale the iteration's result to the norm of an exact polar factor: `frobenius` (the whole
            matrix), `rows`, `columns`, `rows_columns`, `columns_rows`, or `none` (Muon+, arXiv:2602.21545).
        second_moment: divide each row or column of an update by its running root mean square, then restore the norm of
            the whole: `rows` (NorMuon, arXiv:2510.05491), `long_side` (rows, or columns if there are more of them), or
            `none`. Applied after `renormalize`. With `renormalize="frobenius"` and `match_rms_adamw` updates have the
            paper's size. If you change a setting so that moments get another shape, the next step raises and says what
            to delete: `conv_mode`, `stacked` and `transposed` do that, and so does a change between `rows` and
            `long_side` where a matrix has more columns than rows.
        second_moment_beta: decay rate of the running mean of squares.
        experimental_hyperball: keep the norm of each matrix: W becomes R normalized(W - lr R normalized(update)), where
            R is the norm of W. `lr` is then relative to that norm, and no multiplier or decay applies. Needs float32 or
            float64. A parameter of zeros raises; in shards and in stacks, matrices of zeros stay zero.
        decay_mode: `decoupled`; `independent` of lr, W * (1 - weight_decay), where 0.002 is usual; `cautious`,
            decoupled, but only for elements that the update moves towards zero, too; `corrected`, decoupled times lr /
            `decay_lr` (docs/weight_decay.md).
        maximize: maximize the objective instead of minimizing it.
        conv_mode: how a convolution (out, in, *kernel) is seen: `flatten`, as one matrix (out, in * positions), or
            `batched`, as one matrix (out, in) for each position of the kernel.
        normalize_spatial: divide the updates of `batched` convolutions by sqrt(positions).
        expert_keys: components of names whose parameters (E, rows, cols) are stacks of E matrices.
        stacked: whether parameters of three or more dimensions are stacks of matrices (True) or convolutions (False).
            None: their names decide, by `expert_keys` or a component with `conv`; without either, more than three
            dimensions are a convolution. If that leaves it open, AdamW updates the parameter, with a warning.
        is_muon: a function `(name, parameter) -> True, False or None`; None leaves the decision to routing. It is not
            asked about groups that set `use_muon`, as `groups_for` does unless parameters may be stacks or
            convolutions.
        fallback: optimizer of the other parameters: `adamw`, or `nadamw` (AdamW with Nesterov momentum,
            as in timm; torch's NAdam has another formula).
        adamw_lr: learning rate of the fallback's parameters; None means `lr`. Given to the constructor, it applies to
            the groups without an `lr` of their own; a group with its own `lr` may have its own `adamw_lr`, too. In a
            group of matrices alone it has no effect. What is kept is the ratio `lr_factor = adamw_lr / lr`, so
            schedulers need to change `lr` alone. A tensor, or a value beside `lr=0`, has no ratio: the fallback's group
            then gets it as its own `lr`, and beside `lr=0` a warning says so.
        adamw_weight_decay: weight decay of the fallback's parameters; None means `weight_decay`. Given to the
            constructor, it applies to the groups without a `weight_decay` of their own, as `adamw_lr` does.
        adamw_betas: betas of the fallback.
        adamw_eps: eps of the fallback.
        stochastic_rounding: round half-precision matrices up or down at random, without bias; the fallback's
            parameters are rounded to nearest. A step that GradScaler skips uses up random numbers where ranks share
            parameters, but not in a single process: after it, a run on several ranks and one in a single process round
            differently.
        master_weights: with `split`, bfloat16 parameters are the upper halves of float32 values, whose lower 16 bits
            are state: with the same gradients and `momentum_dtype="float32"` they have the bits of float32 parameters
            (docs/master_weights.md). float32 and float64 parameters are not affected; float16 raises. None: each step
            rounds to the parameter's dtype.
        momentum_dtype: dtype of momentum buffers; a change converts those that exist. `int8` stores 8-bit codes with
            one float32 scale for every 64 neighbours in the last dimension (docs/momentum.md). None: new buffers have
            the parameter's dtype, and others keep theirs, unless they are in 8 bits. `float16` holds nothing above
            65504: larger momentum becomes infinite, and from the next step on its matrix is NaN.
        offload: keep momentum in host memory, pinned for a GPU, which holds three batches of it at a time. Torch rounds
            the pinned memory of each parameter up to a power of two: 172 MiB take 256. To read momentum, call
            `state_dict()`, which waits for copies under way. Not with `capturable`, a `process_group` or DTensors.
        qk_clip: settings of QK-clip, a dict (`qk_clip.heads.clip_settings`); call `observe_qk_logits` in the forward
            pass. Its key `report` is a function called one step later with the counts of clipped and non-finite heads.
        capturable: allow a CUDA graph to capture the whole step. A replay uses the numbers that groups had at capture,
            except tensors on the GPU, which it reads again. Capturing a step of matrices that ranks share raises.
            If it is set in a group later, it has no effect, because the tracer of `torch.compile` sets it there.
        release_grads: set `.grad` of a matrix to None as soon as it has been read.
        cuda_graphs: let `warmup()` capture the orthogonalization of batches on a GPU in CUDA graphs. A step replays
            each in one launch. All graphs share one pool of memory, as large as the largest batch or chain of batches
            needs. Other batches run eagerly.
        exchange: how ranks share the work, as `ExchangeOptions`; under DDP, `ExchangeOptions(process_group=...)`.

    Group keys: a group dict may have every argument marked *group* in docs/arguments.md, and:
        use_muon, use_fallback: True chooses that branch for all parameters, False the other; else routing decides.
        split_rows: row counts of the parts of a fused weight, such as queries, keys and values.
        transposed: True if weights are (in, out), as in transformers' `Conv1D`.
        lr_factor: the rate of the fallback's parameters is `lr * lr_factor`.
        decay_lr: the `lr` at which `corrected` decay equals decoupled decay; by default the first `lr` of the group.
        rounding_step: how many steps of `stochastic_rounding` were taken; saved, and the same on all ranks.
        role, reason: a label of yours for the group, and the reason that `explain()` shows for its parameters. It shows
            yours only where the group sets `use_muon` or `use_fallback`; elsewhere routing gives the reason.
        _anything: keys that begin with `_` are yours. Known keys of other libraries are accepted; others raise when the
            group is made. Later new keys are accepted, because schedulers write theirs there, and the next step warns
            of one that resembles a setting, such as `weight_deacy`.

    State: matrices have `momentum_buffer` in their shape, in `momentum_dtype`; `momentum_scale` if that is `int8`,
    float32 with a size of ceil(columns / 64) in the last dimension; and `second_moment` if asked for, float32, or
    float64 of float64 parameters, with size 1 along the dimensions that share a moment. The other parameters have
    `step`, a float32 number (not outside of their mesh), `exp_avg` and `exp_avg_sq`, in their dtype, or in float32 if
    they are float16 or have master weights. `master_weights` add `remainder`, in bfloat16. State is made at
    construction. Raises ValueError or TypeError for settings that cannot work, before anything is changed.
    """

    # Attributes that copies and pickles keep besides groups and state.
    _kept = (
        "_cuda_graphs",
        "_is_muon",
        "_reasons",
        "_uncut",
        "_exchange",
        "_replica_ranks",
        "_release_grads",
        "_clip",
        "_agreement",
        "_change",
    )
    _norms: Sequence[UpdateNorms] = ()  # of the last step
    _grad_scale: Optional[Tensor] = None  # of the last step
    _first_steps = FirstSteps()
    _is_made = False  # whether the constructor has checked all groups at once

    @with_known_arguments
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
        use_addmm: Optional[bool] = None,
        *,
        foreach: Optional[bool] = None,
        fused: Optional[bool] = None,
        update_rms: float = UPDATE_RMS,
        ns_dtype: torch.dtype | str | None = None,
        ns_method: str = "auto",
        equalize: str = "none",
        renormalize: str = "none",
        second_moment: str = "none",
        second_moment_beta: float = 0.95,
        experimental_hyperball: bool = False,
        decay_mode: str = "decoupled",
        maximize: bool = False,
        conv_mode: str = "flatten",
        normalize_spatial: bool = True,
        expert_keys: Sequence[str] = EXPERT_KEYS,
        stacked: Optional[bool] = None,
        is_muon: Optional[IsMuon] = None,
        fallback: str = "adamw",
        adamw_lr: float | Tensor | None = None,
        adamw_weight_decay: float | Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        stochastic_rounding: bool = False,
        master_weights: Optional[str] = None,
        momentum_dtype: torch.dtype | str | None = None,
        offload: bool = False,
        qk_clip: Optional[Mapping[str, Any]] = None,
        capturable: bool = False,
        release_grads: bool = False,
        cuda_graphs: bool = True,
        exchange: Optional[ExchangeOptions] = None,
    ):
        check_implementations({"use_addmm": use_addmm, "foreach": foreach, "fused": fused}, "muon")
        # The arguments that are group settings, by name.
        settings = {key: value for key, value in locals().items() if key in SETTINGS}
        defaults = plain_settings({**settings, **OF_GROUPS, "rounding_step": 0})
        self._release_grads = flag("release_grads", release_grads)
        if not isinstance(exchange, (ExchangeOptions, type(None))):
            raise TypeError(
                f"exchange must be ExchangeOptions(...) of this package or None, got {exchange!r}: for a process group "
                "write ExchangeOptions(process_group=...)"
            )
        options = exchange or ExchangeOptions()
        check_is_muon(is_muon)
        self._replica_ranks = ranks_of(options.process_group)
        self._exchange = replace(options, process_group=None)  # process groups cannot be pickled
        self._clip = None if qk_clip is None else QKClip(qk_clip)
        self._is_muon = is_muon
        self._reasons: dict[Tensor, str] = {}
        self._agreement = RankAgreement()
        self._change = Change()
        self._cuda_graphs = flag("cuda_graphs", cuda_graphs)
        self._graphs = UpdateGraphs()
        self._plan_cache = self._new_plan_cache()
        self._handle = handle_of(self)
        self._uncut: Sequence[Any] = getattr(params, "uncut", ())  # what `groups_for` could not find out
        params = params_as_list(params, least=1)
        super().__init__(params, defaults)
        if self._clip is not None:
            # Only now is their order certain: wrappers may replace or remove parameters, which keep their names.
            names = {p: name for group in self.param_groups for name, p in named_parameters(group)}
            self._clip.replace_positions([names[p] for p in self._reasons])  # routing has recorded them as they came
        self._refresh()
        lines = same_names(self.param_groups, self.param_groups) + idle_keys(self.param_groups)
        lines += ([] if is_muon is None else idle_is_muon(params)) + plain_parts(self.param_groups)
        lines += idle_adamw_arguments(self.param_groups, self.defaults) + fast_decay(self.param_groups)
        idle = idle_exchange(exchange)
        self._first_steps = FirstSteps(exchange_is_idle=exchange == ExchangeOptions() and not idle)
        told = told_names(self.param_groups)
        for line in advice(routed(self.param_groups, self._reasons), told) + lines + idle:
            warn_user(line)
        self._is_made = True

    def step(self, closure: Optional[Callable[[], Any]] = None):
        """Update every parameter that has a gradient; call `closure` first, if given, and return its result.

        Parameters and state change in place; gradients do not. `torch.autocast` has no effect. In a compiled function
        the step is one op of the graph, or breaks the graph (`docs/faq.md` says when).

        Raises ValueError or TypeError, before anything is changed, for gradients that are sparse or would be rounded,
        for parameters whose shape no longer matches their state, and for changed settings that cannot work. Raises
        RuntimeError for work that a CUDA graph being captured would not repeat; and after a step or load that failed
        halfway, until a state is loaded. Ctrl-C raises KeyboardInterrupt once the update is complete, unless it is
        pressed again or ranks share parameters.

        Among ranks it raises ValueError if they differ in a setting that the plan depends on, and RuntimeError

        - if they do not take the same step: another `lr` or gradient scale, other optimizers, gradients on only some of
          the ranks that need them together. On a GPU the next `step()` or `state_dict()` says so.
        - at the first step, and the first one after a load, if their replicas differ.

        Nothing that disagreeing ranks share has changed then.
        """
        return self._step_without_hooks(closure)

    def _step_without_hooks(self, closure: Optional[Callable[[], Any]]) -> Any:
        """Do what `step` does. torch lets each class's `step` run the hooks, so a subclass's must not call that."""
        if torch.compiler.is_dynamo_compiling() and is_traceable(vars(self), closure):
            return traced_step(vars(self))
        return self._eager_step(closure)

    @torch._disable_dynamo  # torch.compile's tracer does not support torch's fused AdamW.
    @torch.inference_mode(False)  # Otherwise later steps could not change what this one keeps.
    @torch.no_grad()
    def _eager_step(self, closure: Optional[Callable[[], Any]]) -> Any:
        try:
            return self._take_step(closure)
        except BaseException:
            # GradScaler deletes them only after a step that succeeds; the next step would read leftovers.
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            raise

    @property
    @torch.inference_mode(False)  # As for a step.
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `step` unscales gradients itself: if it is captured, or if ranks share parameters."""
        return bool(self._current_plan().terms) or any(group["capturable"] for group in self.param_groups)

    def observe_qk_logits(self, layer: str | int, logits: Tensor) -> None:
        """Record the largest attention logits (..., heads) of one layer since the last good step, for QK-clip.

        `layer` is the name of the attention's module, or the last number in it if no other attention has that number.
        If `qk_clip` has `layers`, it is a key of that dict, or a position in that sequence.

        Pass the scaled logits that enter the softmax, with -inf for heads that only other ranks have, on any device. It
        waits for a device only if some of the weights are on the CPU. Raises ValueError without `qk_clip`, for an
        unknown layer, and for a wrong number of heads; TypeError for logits that are not a dense floating-point tensor.
        State dicts do not have the logits: save after a step. Loading one forgets them.
        """
        if self._clip is None:
            raise ValueError("observe_qk_logits needs Muon(..., qk_clip={...})")
        if not isinstance(logits, Tensor):
            raise TypeError(f"logits must be a tensor (..., heads), got {type(logits).__name__}")
        if logits.device not in self._clip.devices:  # the model was moved, perhaps, and no step has noticed yet
            self._refresh()
        self._clip.observe_(layer, logits)

    @torch._disable_dynamo  # In a graph it would show the step before.
    def metrics(self) -> dict[str, Tensor]:
        """Return metrics of the last step as 0-d tensors; only reading one waits for the device.

        They are `matrices` and `matrices_not_finite`; `muon_update_norm`, the Frobenius norm of lr * multiplier *
        update over all matrices, and `muon_update_rms`, the same as a root mean square; `muon_gradient_norm` and
        `fallback_gradient_norm`, of the gradients that exist at this call; and with `qk_clip` the numbers
        `heads_clipped` and `heads_not_finite`. If ranks share parameters, metrics cover this rank's work and shards; no
        other rank is asked. If a step redistributes a gradient, they cover what this rank has before that.
        """
        metrics = {**update_metrics(self._norms), **gradient_norms(self.param_groups, self._grad_scale)}
        if self._clip is not None and self._clip.counts is not None:
            metrics["heads_clipped"], metrics["heads_not_finite"] = self._clip.counts.unbind()
        return metrics

    def __repr__(self) -> str:
        beside = {
            "is_muon": self._is_muon,
            "qk_clip": None if self._clip is None else self._clip.settings,
            "release_grads": self._release_grads,
            "cuda_graphs": self._cuda_graphs,
            "exchange": None if self._exchange == ExchangeOptions() else self._exchange,
        }
        defaults = {key: argument.default for key, argument in inspect.signature(Muon).parameters.items()}
        return brief(type(self).__name__, self.param_groups, {**self.defaults, **beside}, defaults)

    @torch.inference_mode(False)  # As for a step.
    def explain(self) -> Explanation:
        """Return a table with a row for each parameter: print it, show it in a notebook, iterate, or read `.rows`.

        A row has the parameter's branch and the reason for it, its multiplier, kernel and owner, the current `lr` and
        `weight_decay` (for tensors on a GPU only the device, since reading them would wait for it), the bytes of its
        whole state, and an estimate of the FLOPs of its orthogonalization. Lines below the table are about exchanges,
        and about what you should know or decide. Later steps do not change the table.
        """
        plan = self._current_plan()
        notes = self._graphs.described(plan.chains(), self.param_groups) if self._cuda_graphs else ()
        return explanation_of(self.param_groups, plan, self._reasons, self.state, notes, self._uncut)

    @torch.inference_mode(False)  # As for a step.
    def warmup(self, progress: Optional[Progress] = None, budget: float = 60.0) -> None:
        """Do before training what the first steps would wait for: connect ranks, choose and compile kernels, capture.

        Matrix products that this machine has not measured yet are checked against float64 and timed against torch's,
        for at most about `budget` seconds. The fastest correct ones are used from then on and stored in the user's
        cache folder (`tune`); unmeasured products keep their defaults. Parameters, gradients and state do not change.
        `progress(done, total, what)` is called after each stage; None draws a progress line.

        Call it before you capture your own CUDA graphs: it frees cuBLAS's workspaces, which such graphs may use.
        Ranks that share parameters must all call it. If their plans differ they raise ValueError, as the first step
        would. One rank measures for each kind of device. What ranks have agreed on stays until their processes
        end, even if the number of threads changes. Raises RuntimeError if some of these ranks have already agreed on
        something else with other ranks. Where there are other ranks, and nobody says which of them have copies of a
        matrix, as under DDP without `exchange`, nothing is checked or measured for it, and a warning says so.
        """
        check_call(budget, progress)
        self._graphs.drop()  # what has changed, or is measured now, decides which ones there are
        plan = self._current_plan()
        # Ranks may differ in which kernels have failed: the stages tell all ranks about all failures.
        terms = {ranks: shared._replace(kernels=to_measure(ranks, plan)) for ranks, shared in plan.terms.items()}
        with self._plan_cache.undone_unless_agreed_(self.state):
            self._agreement.meet("warm-up", terms, self.param_groups)
        tuner = Tuner(budget)
        phases = (
            lambda: connect_stages(self._plan_cache.plan),
            lambda: measure_stages(self._plan_cache.plan, tuner),
            lambda: compile_stages(self._current_plan(), self.param_groups),
            lambda: self._graphs.stages(self._plan_cache.plan.chains() if self._cuda_graphs else (), self.param_groups),
        )
        warm_up(phases, Line("warm-up") if progress is None else progress)

    @torch.inference_mode(False)  # As for a step.
    def check_copies(self) -> None:
        """Raise RuntimeError if replicas of a parameter or of its state differ in any bit, on the ranks that share it.

        The error names the tensors and ranks. Either hardware has failed, or something has changed one replica only.
        Replicas exist in HSDP, in tensor parallelism, and on the ranks of `ExchangeOptions.process_group`. All ranks
        must call it, for example every 100 steps. It reads every replicated tensor once and waits for the device. The
        first step, and the first one after a load, compare replicas, too. If plans differ it raises ValueError. Warns
        if there are other ranks and it shares nothing with any, as far as it knows, as under DDP without `exchange`.
        """
        self._check_last_step()
        terms = self._current_plan().terms
        with self._plan_cache.undone_unless_agreed_(self.state):
            self._agreement.meet("check_copies", terms, self.param_groups)
        check_copies(terms, self.param_groups, self.state)

    @torch.inference_mode(False)  # As for a step.
    @torch.no_grad()
    def master_weights(self) -> dict[str, Tensor]:
        """Return, by name, the float32 value of each parameter with `master_weights`: new tensors, sharded alike.

        `{**model.state_dict(), **optimizer.master_weights()}` is a checkpoint in which these are float32; frozen
        parameters and buffers keep their dtype. A tied weight has its first name alone. Raises RuntimeError as
        `state_dict` does; ValueError if two such parameters have the same name.
        """
        self._check_before_save()
        self._refresh()
        return master_weights(self.param_groups, self.state)

    @torch.inference_mode(False)  # As for a step.
    @torch.no_grad()
    def load_master_weights(self, values: Mapping[str, Tensor]) -> None:
        """Set parameters with `master_weights`, and the lower halves in their state, in place to `values` by name.

        `values` are float32 tensors sharded like the parameters, as `master_weights()` returns them, or whole ones, of
        which each rank takes its parts. Other names are ignored, so a whole model's state dict can be given. Raises
        ValueError or TypeError, with nothing changed, if a value is missing or does not fit. If memory runs out while
        it copies, neither `step` nor `state_dict` works until a state is loaded.
        """
        self._refresh()
        load_master_weights(self.param_groups, self.state, values, self._change)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; it becomes two neighbouring groups if it holds both matrices and other parameters.

        Each call makes a new plan for all groups: give many groups to the constructor instead.
        `param_group` itself is not changed. Raises ValueError or TypeError, with nothing added, for settings or
        parameters that cannot work.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        count = sum(len(group["params"]) for group in self.param_groups)
        groups, reasons = split_group(param_group, self.defaults, self._is_muon, count)
        before = len(self.param_groups)
        try:
            for group in groups:
                super().add_param_group(group)
            if self._is_made:
                self._refresh()
                added = self.param_groups[before:]
                others = routed(self.param_groups[:before], self._reasons)
                lines = advice(routed(added, reasons), told_names(self.param_groups), others)
                lines += same_names(self.param_groups, added) + idle_keys(added, self.defaults["expert_keys"])
                for line in lines + plain_parts(added) + fast_decay(added):
                    warn_user(line)  # raises if the user turns warnings into errors
        except BaseException:  # Ctrl-C, too: half of a group would be left, which nobody could add again
            del self.param_groups[before:]
            self._plan_cache.forget()
            raise
        self._reasons.update(reasons)

    def state_dict(self) -> dict[str, Any]:
        """Return state and groups of the current parameters. State that you have parked on another device stays there.

        A function in a group, such as an `adjust_lr_fn` of yours, is saved as a placeholder: loading keeps the function
        that the optimizer has.

        Raises RuntimeError while a step is running, as in a signal handler, if the last step or load failed halfway,
        or, once, if ranks on GPUs did not take the same step. It sends nothing, so one rank may call it alone.
        """
        with torch.inference_mode(False):  # As for a step. Hooks of users run in the caller's mode.
            self._check_before_save()
            self._refresh(moving=False)
            self._plan_cache.synchronize()
        # It runs before hooks of users, which may return anything.
        hook = self.register_state_dict_post_hook(
            lambda _, saved: {**saved, "param_groups": list(map(saved_group, saved["param_groups"]))}, prepend=True
        )
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of a state dict that was saved for the same parameters in the same order.

        Functions, and settings that a saved group lacks (`torch.optim.Muon`'s lack many), stay as they are here, and
        momentum keeps its saved dtype unless `momentum_dtype` names another. If parameters are sharded and the file has
        whole tensors, as one process saves them, each rank takes its parts, and nothing is sent. A group without
        `decay_mode`, such as torch's, also leaves `weight_decay` as it is under independent decay, and `lr` under
        hyperball: they mean something else there. Warns of settings that a file of this package replaces, other than
        those that schedulers set, and of momentum that keeps another dtype than a new optimizer's would have. Raises
        ValueError or TypeError, with nothing changed, if something does not fit. If memory runs out while it copies,
        neither `step` nor `state_dict` works until another load has succeeded.
        """
        check_is_dict(state_dict)
        final: dict[str, Any] = {}

        def check(_, loaded: dict[str, Any]) -> dict[str, Any]:
            check_state_dict(loaded)
            final.update(checked(loaded, self.param_groups))
            return as_saved(loaded)

        # Our pre-hook runs last and sees the dict as other hooks leave it; our post-hook runs first.
        hooks = [
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(lambda _: self._copy_state(final), prepend=True),
        ]
        # Under inference mode no step could change the copies. Elsewhere hooks of users keep the caller's mode.
        inference = torch.is_inference_mode_enabled()
        try:  # Ctrl-C waits for our copies: until then the state has the tensors of the file.
            with torch.inference_mode(False) if inference else nullcontext(), interrupted_at_the_end():
                super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _copy_state(self, loaded: dict[str, Any]) -> None:
        """Copy the tensors of a loaded state dict, because torch shares them and casts momentum."""
        with self._change.running():  # memory may run out for copies
            if self._clip is not None:
                self._clip.forget()
            copy_loaded_(self.param_groups, self.state, loaded)

    def __getstate__(self) -> dict[str, Any]:
        self._plan_cache.synchronize()
        return {**super().__getstate__(), **{key: getattr(self, key) for key in self._kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # `load_state_dict` calls this too, after every hook and before anything is changed.
        if "param_groups" in self.__dict__:
            unbox_(state["state"])
            groups = loaded_groups(self.param_groups, state["param_groups"], state["state"])
            checked_parameters(groups, state["state"], self._replica_ranks)
            state = {**state, "param_groups": groups}
        super().__setstate__(state)
        if "_graphs" not in self.__dict__:  # a copy makes its own
            self._graphs = UpdateGraphs()
        else:
            self._plan_cache.synchronize()
        self._plan_cache = self._new_plan_cache()
        self._is_made = True
        self._handle = handle_of(self)
        self._agreement.forget()

    def _take_step(self, closure: Optional[Callable[[], Any]]) -> Any:
        if is_capturing():  # else the refresh does it
            self._plan_cache.restore_capturable_(self.param_groups)
        check_capture(self.param_groups, self._clip is not None and self._clip.report is not None)
        self._check_last_step()
        check_closure(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = self._refresh()
        plan, premises = self._plan_cache.plan, self._plan_cache.premises
        check_captured_plan(plan)
        elsewhere = check_gradients(premises, gradients, self.param_groups)
        self._first_steps, lines = self._first_steps.and_this(gradients, premises.params, self.param_groups)
        for line in lines:
            warn_user(line)
        # GradScaler sets both. `found_inf` counts devices whose gradients overflow, an int if there are no gradients.
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        scaling = GradientScaling(grad_scale, found_inf.clamp(max=1) if isinstance(found_inf, Tensor) else None)
        if self._clip is not None:
            self._clip.begin_step()
        layouts = layouts_of(gradients, elsewhere, premises.params)
        with self._plan_cache.undone_unless_agreed_(self.state):
            scalings = self._agreement.begin_step(plan.terms, self.param_groups, scaling, layouts)
        self._agreement.compare_copies(self.param_groups, self.state)
        if elsewhere:
            redistribute_(gradients, elsewhere, premises.params, self._agreement.skipping())
        self._agreement.count_step()
        self._grad_scale = snapshot(scaling.grad_scale)
        with self._change.running(among_ranks=bool(plan.terms)), ExitStack() as stack:
            for device_type in filter(autocasts, premises.device_types):
                stack.enter_context(without_autocast(device_type))
            self._update_(gradients, scalings)
            for group in self.param_groups:
                group["rounding_step"] += group["stochastic_rounding"]  # True counts one step
        self._agreement.end_step(self._release_grads)
        return loss

    def _update_(self, gradients: Gradients, scalings: Scalings) -> None:
        """Update all matrices (momentum, orthogonalization, descent), then the other parameters.

        Empties `gradients`.
        """
        row_scales = {} if self._clip is None else self._clip.take_scales(scalings)
        context, workspace = StepContext(self.param_groups, scalings, self._graphs), self._plan_cache.workspace
        try:
            workspace.begin_step(gradients, self.state, row_scales)
            self._norms = update_matrices_(workspace, context, self._exchange.chunks_in_flight)
            for work in workspace.fallback:
                update_fallback_(work, self.param_groups[work.batch.group], scalings)
        finally:
            workspace.end_step()
        if row_scales:
            scaled = {source.tensor for source in workspace.parameters}
            scale_other_rows_(row_scales, self.state, scaled, self._replica_ranks, scalings)

    def _refresh(self, moving: bool = True) -> Gradients:
        return self._plan_cache.refresh_(self.param_groups, self.state, self._reasons, moving)

    def _new_plan_cache(self) -> PlanCache:
        beside = self._exchange, self._replica_ranks, self._release_grads
        return PlanCache(*beside, self._clip, self._agreement, self._graphs)

    def _current_plan(self) -> Plan:
        self._refresh()
        return self._plan_cache.plan

    def _check_last_step(self) -> None:
        """Raise RuntimeError as `check_complete` does, or, once, if ranks did not take the same step."""
        self._change.check_complete()
        read_all(self._plan_cache.plan.terms)

    def _check_before_save(self) -> None:
        """Raise what `_check_last_step` does, but without a message to other ranks, as one rank may save alone."""
        self._change.check_complete()
        check_last_meeting(self._plan_cache.plan.terms)
