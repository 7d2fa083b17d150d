"""Muon: momentum, orthogonalized, for the matrices; AdamW for the rest; one `torch.optim.Optimizer`.

The class is longer than a file's budget, as a `torch.optim.Optimizer` is one class: what torch calls on it (groups,
state, copies, `step`) reads best in one place. All that it does is in the floors below.
"""

from __future__ import annotations

import inspect
import operator
import warnings
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Callable, Collection, Mapping, Optional, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from .explain import Explanation, brief, explanation_of
from .kernels.autocast import without_autocast
from .learning_rate import UPDATE_RMS, Adjustment
from .parameters.advice import NO_GRADIENT, advice, idle_keys, routed
from .parameters.checkpoints import checked, loaded_groups
from .parameters.groups import names_of, saved_group, split_group
from .parameters.mistakes import check_closure, check_state_dict, params_as_list, with_known_arguments
from .parameters.routing import IsMuon
from .parameters.settings import OF_GROUPS, SETTINGS, checked_settings, flag, make_plain_, plain_settings
from .parameters.synonyms import check_implementations
from .plan.exchanges import ExchangeOptions
from .plan.gradients import check_gradients
from .plan.layout import facts_of
from .plan.plan import Plan, choices, make_plan, planned_settings
from .plan.process_groups import Ranks, ranks_of
from .qk_clip.clip import QKClip
from .rules.scaling import GradientScaling
from .step.batch import UpdateNorms, update_local_
from .step.capture import check_capture
from .step.copies import check_copies
from .step.graphs import UpdateGraphs
from .step.master_weights import load_master_weights, master_weights
from .step.metrics import gradient_norms, update_metrics
from .step.rank_agreement import RankAgreement, read_all
from .step.rank_tuning import measurements
from .step.recipe import Recipes, snapshot
from .step.state import bring_states_, checked_parameters, copy_loaded_, entries, lacks_state
from .step.traced import handle_of, is_traceable, traced_step
from .step.update import scale_other_rows_, update_fallback_, update_shared_
from .step.warmup import connections, kernels, warm_up
from .step.workspace import Workspace, dependencies
from .tuning.progress import Line, Progress
from .tuning.tune import Tuner, check_budget


class Muon(Optimizer):
    """Muon for matrices and AdamW for every other parameter.

    One step of a rows x cols matrix W with gradient G, of the group's settings:

        M <- momentum * M + (1 - momentum) * G
        D  = momentum * M + (1 - momentum) * G  if nesterov else  M
        W <- W * (1 - lr * weight_decay) - lr * multiplier(rows, cols) * orthogonalize(D)

    Args:
        params: tensors, `(name, tensor)` pairs such as `model.named_parameters()`, or group dicts of either. A group
            that holds both kinds becomes two neighbours of one live `lr`. Group keys: every argument that
            `docs/arguments.md` marks; `use_muon` or its opposite `use_fallback` (absent: decided by routing);
            `split_rows`, the row counts of weights that are several in one, such as queries, keys, values;
            `transposed`, that weights are (in, out); `lr_factor`, by which the fallback's parameters move more than
            `lr`; `decay_lr`, the `lr` at which `corrected` decay is the decoupled one (absent: the group's first);
            `role`, by which users tell groups apart, and `reason`, which `explain()` says of the parameters. Other keys
            raise, but for what schedulers and libraries write, and for those of your own that begin with `_`.
        lr: step size in units of the multiplier; a float or a tensor of one element, read at every step.
        weight_decay: of every parameter of the group; a float or a tensor of one element, read at every step.
        momentum: beta of the average of gradients.
        nesterov: look one step ahead.
        ns_coefficients: a preset of `schedules.PRESETS`, one `(a, b, c)` or a sequence of them.
        eps: a matrix is divided by max(norm, eps); 0 makes the update free of the gradient's scale.
        ns_steps: steps of the iteration.
        adjust_lr_fn: `match_rms_adamw` (updates as large as AdamW's), `original` (spectral norm; also None),
            `rms_to_rms`, or a function of a matrix's rows and columns.
        use_addmm, foreach, fused: choices between implementations that torch has: None and False change nothing. True
            is accepted where it holds anyway: `use_addmm`, and in groups of one fallback alone its own.
        update_rms: root mean square of an update by `match_rms_adamw`, before `lr`; DeepSeek-V4 has 0.18.
        ns_dtype: dtype of the iteration, a torch.dtype or its name; None: `iteration.default_work_dtype`.
        ns_method: `standard`, `gram`, `gram_float32`, or `auto`, the cheaper where both are safe (`orthogonalize`).
        equalize: divide lines of a matrix by their norms before the iteration: `rows`, `columns`, `rows_columns` (one
            after the other), `columns_rows`, or `none` (MuonEq, arXiv:2603.28254). Or `experimental_aurora`, at twice
            the cost: scale the lines of the long side so that those of the polar factor have nearly one norm (Aurora,
            arXiv:2606.27715).
        renormalize: give polar factors the norm of exact ones, as a whole, `frobenius`, or to all lines of a side
            alike, `rows`, `columns`, `rows_columns`, `columns_rows`; or `none` (Muon+, arXiv:2602.21545).
        second_moment: divide each row of an update by the root mean square that it has had over the steps, and give the
            whole its norm back: `rows` (NorMuon, arXiv:2510.05491); `long_side`: rows, or columns where these are more,
            with means over the short side; or `none`. It comes after `renormalize`: with `frobenius` there, and
            `match_rms_adamw`, an update's root mean square is the paper's.
        second_moment_beta: how much of the average of mean squares a step keeps.
        experimental_hyperball: keep the norm of each matrix: W becomes R normalized(W - lr R normalized(update)), with
            R the norm of W. `lr` is a proportion of it then, and no multiplier or decay applies. For float32 and
            float64. A parameter of zeros raises; on shards, and as one matrix of a stack, zeros stay zeros.
        decay_mode: `decoupled`; `independent` of lr, W * (1 - weight_decay); `cautious`, decoupled and only where it
            goes the way of the update; `corrected`, decoupled times lr / `decay_lr` (`docs/weight_decay.md`).
        maximize: ascend.
        conv_mode: a convolution (out, in, *kernel) is a matrix (out, in * positions), `flatten`, or one (out, in) for
            each position of its kernel, `batched`.
        normalize_spatial: divide the steps of `batched` convolutions by sqrt(positions).
        expert_keys: components of names whose parameters (E, rows, cols) are E matrices.
        stacked: whether parameters of three dimensions are stacks of matrices, or convolutions; None: as `expert_keys`
            or a component with `conv` say. Where neither does, the fallback has them, and a warning says so.
        is_muon: `(name, parameter) -> True, False or None`, where None leaves the decision to routing.
        fallback: optimizer of the other parameters: `adamw`, or `nadamw` (AdamW with Nesterov momentum).
        adamw_lr: learning rate of the fallback's parameters, in groups that set no `lr`; None: `lr`. Its first ratio to
            `lr` is their `lr_factor`, which outlives schedules of one rate. Beside an `lr` of 0, or as a tensor, it has
            none, and is the `lr` of the fallback's group.
        adamw_betas, adamw_eps: of the fallback.
        stochastic_rounding: round half-precision matrices up or down at random, without bias.
        master_weights: `split`: bfloat16 parameters are the upper halves of float32 ones, whose lower halves are 16
            bits of state. Training has the bits of float32 parameters' by both branches (`docs/master_weights.md`).
            float32 and float64 parameters stay as they are; float16 raises. None: parameters are rounded as they are.
        momentum_dtype: of momentum buffers that are made; None: the parameter's. `int8`: codes of 8 bits, and a float32
            scale for each 64 neighbours in the last dimension (docs/momentum.md). A change from or to it, also in a
            group later, converts the momentum that is there; another one is of new buffers alone.
        offload: keep momentum buffers in host memory, pinned for a GPU, which has those of three batches at a time.
            Read them through `state_dict()`, which waits for them. Not with `capturable`, nor for matrices that ranks
            share.
        qk_clip: settings of QK-clip (`qk_clip.heads.clip_settings`; also `report`, called with the counts of clipped
            and of not finite heads one step later), for which `observe_qk_logits` is called in the forward pass.
        release_grads: set `.grad` of a matrix to None as soon as it has been read.
        capturable: the step may be captured in a CUDA graph; numbers in groups are captured as they are, and tensors
            on the GPU read.
        cuda_graphs: let `warmup()` capture the orthogonalization of each kind of batch on a GPU in a CUDA graph, which
            steps replay as one launch. They hold memory for the largest batch from then on. Other batches, as those
            that miss a gradient, are launched eagerly.
        exchange: how ranks share the work, as `ExchangeOptions`; under DDP, `ExchangeOptions(process_group=...)`.

    State: `momentum_buffer`, with `momentum_scale` where it is in 8 bits, and `second_moment` where asked for, for
    matrices; `step`, `exp_avg`, `exp_avg_sq` for the rest; `remainder` with `master_weights`; made at construction.
    Raises ValueError or TypeError for settings that cannot work, before anything is changed.
    """

    # What a copy or a pickle keeps besides groups and state.
    _kept = (
        "_cuda_graphs",
        "_is_muon",
        "_reasons",
        "_exchange",
        "_replica_ranks",
        "_release_grads",
        "_clip",
        "_agreement",
        "_broke_off",
    )
    _plan = Plan()
    _workspace: Optional[Workspace] = None
    _planned_for: Optional[tuple[list[Tensor], list[Any]]] = None
    _checked: Sequence[Any] = ()  # settings
    _shapes: Sequence[torch.Size] = ()  # of the parameters
    _entries = 0  # of their state
    _device_types: Collection[str] = ()  # of the parameters
    _workspace_for: Sequence[Any] = ()
    _broke_off = False  # the last step
    _norms: Sequence[UpdateNorms] = ()  # of the last step
    _grad_scale: Optional[Tensor] = None  # of the last step
    _said_idle = False  # that no parameter has a gradient

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
        expert_keys: Sequence[str] = ("experts",),
        stacked: Optional[bool] = None,
        is_muon: Optional[IsMuon] = None,
        fallback: str = "adamw",
        adamw_lr: float | Tensor | None = None,
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
        # Every argument that is a setting of groups, by its name.
        settings = {key: value for key, value in locals().items() if key in SETTINGS}
        defaults = plain_settings({**settings, **OF_GROUPS, "rounding_step": 0})
        self._release_grads = flag("release_grads", release_grads)
        if not isinstance(exchange, (ExchangeOptions, type(None))):
            raise TypeError(f"exchange must be ExchangeOptions, got {type(exchange).__name__}")
        exchange = exchange or ExchangeOptions()
        self._replica_ranks = ranks_of(exchange.process_group)
        self._exchange = replace(exchange, process_group=None)  # which no pickle could hold
        self._clip = None if qk_clip is None else QKClip(qk_clip)
        self._is_muon = is_muon
        self._reasons: dict[Tensor, str] = {}
        self._agreement = RankAgreement()
        self._cuda_graphs = flag("cuda_graphs", cuda_graphs)
        self._graphs = UpdateGraphs()
        self._handle = handle_of(self)
        super().__init__(params_as_list(params, least=1), defaults)
        self._refresh()
        for line in advice(routed(self.param_groups, self._reasons)) + idle_keys(self.param_groups):
            warnings.warn(line, stacklevel=3)

    def step(self, closure: Optional[Callable[[], Any]] = None):
        """Update every parameter that has a gradient, and return what `closure`, called first if given, returns.

        Parameters and state change in place; gradients do not. `torch.autocast` changes nothing. In a function that is
        compiled it is one op of the graph, or breaks it (`docs/faq.md` says when). Raises ValueError or TypeError
        before anything is changed for gradients that are sparse, for parameters whose shape is no longer that of their
        state, and for settings of groups that have been changed and cannot work; RuntimeError while a CUDA graph is
        captured, for what it would not repeat; after a step that broke off, until a state is loaded; and if ranks do
        not take the same step: with other settings or of other optimizers, or with gradients of some copies of a part
        only. Then nothing that these ranks share is changed; parameters on a GPU have the next call raise it, which
        waits for the device all the same.
        """
        if torch.compiler.is_dynamo_compiling() and is_traceable(vars(self), closure):
            return traced_step(vars(self))
        return self._eager_step(closure)

    @torch._disable_dynamo  # The tracer does not take torch's fused AdamW.
    @torch.no_grad()
    def _eager_step(self, closure: Optional[Callable[[], Any]]) -> Any:
        try:
            return self._take_step(closure)
        except BaseException:
            # GradScaler deletes them after a step that succeeds, and would count in what is left of another.
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            raise

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether steps unscale gradients themselves: captured ones, and those of ranks that would wait for others."""
        self._refresh()
        return bool(self._plan.terms) or any(group["capturable"] for group in self.param_groups)

    def observe_qk_logits(self, layer: str | int, logits: Tensor) -> None:
        """Note the largest attention logits (..., heads) of one layer since the last step, for QK-clip.

        They are the ones before the softmax, scaled as it sees them, -inf for heads that only other ranks have; the
        device is not waited for. Raises ValueError without `qk_clip`, for an unknown layer or number of heads.
        """
        if self._clip is None:
            raise ValueError("observe_qk_logits needs Muon(..., qk_clip={...})")
        self._clip.observe_(layer, logits)

    @torch._disable_dynamo  # A graph would show what was before its step.
    def metrics(self) -> dict[str, Tensor]:
        """Return metrics of the last step, as 0-d tensors: reading one is what waits for the device.

        `matrices`, `matrices_not_finite`, norm and root mean square of their updates, and of `qk_clip` the heads
        clipped and not finite. The gradient norms of both branches are of the gradients that are still there at this
        call. Where several ranks share parameters, each metric is of what this rank has worked on and holds, be it a
        copy or a part, and no other rank is asked.
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

    def explain(self) -> Explanation:
        """Return a row for each parameter, to print, show in a notebook, iterate over, or read as `.rows`.

        A row has the parameter's branch, the reason, its multiplier, the products it runs on and who owns it; `lr` and
        `weight_decay` as they are now, and where those are tensors on a GPU only that, since reading them would wait
        for it; the bytes of its whole state; and FLOPs of its orthogonalization, an estimate. Nothing of it is changed
        by later steps.
        """
        self._refresh()
        notes = self._graphs.described(self._plan.all_batches(), self.param_groups) if self._cuda_graphs else ()
        return explanation_of(self.param_groups, self._plan, self._reasons, self.state, notes)

    def warmup(self, progress: Optional[Progress] = None, budget: float = 60.0) -> None:
        """Make communicators, prove and time what steps multiply by, compile every kernel, and capture CUDA graphs.

        Products that this machine has not measured are proven against float64 and timed against torch's, for `budget`
        seconds, which are looked at between measurements; the fastest right ones are taken from then on, and kept in
        the user's cache folder (`tune`). What is left out stays as it is by default. Parameters, gradients and state
        do not change. `progress(done, total, what)` is called after each stage; None draws a line.

        Ranks that share parameters must all call it. They compare their plans, and raise ValueError as the first step
        would; one rank of each kind of device measures for the others of its kind, and RuntimeError says where ranks
        have agreed on something else with others before.
        """
        check_budget(budget)
        self._refresh()
        # What has failed on some ranks alone, all ranks will know after this: it is no reason to refuse.
        terms = {ranks: shared._replace(failed="") for ranks, shared in self._plan.terms.items()}
        self._agreement.meet("warm-up", terms, self.param_groups)
        tuner = Tuner(budget)
        phases = (
            lambda: connections(self._plan),
            lambda: measurements(self._plan, tuner),
            lambda: kernels(self._current_plan(), self.param_groups),
            lambda: self._graphs.stages(self._plan.all_batches() if self._cuda_graphs else (), self.param_groups),
        )
        warm_up(phases, progress or Line("warm-up"))

    def _current_plan(self) -> Plan:
        self._refresh()
        return self._plan

    def check_copies(self) -> None:
        """Raise RuntimeError on the ranks that share a parameter whose copies, or whose state's, differ in a bit.

        It names the tensors and ranks that differ: memory or a processor has failed, or something has changed one copy
        alone. Copies are those of HSDP, of tensor parallelism, and of the ranks of `ExchangeOptions.process_group`. All
        ranks must call it, say every 100 steps: it reads what there are copies of once, and waits for the device.
        """
        self._check_last_step()
        self._refresh()
        self._agreement.meet("check_copies", self._plan.terms, self.param_groups)
        check_copies(self._plan.terms, self.param_groups, self.state)

    @torch.no_grad()
    def master_weights(self) -> dict[str, Tensor]:
        """Return the float32 value of each parameter with `master_weights`, by name, as a new tensor laid out like it.

        `{**model.state_dict(), **optimizer.master_weights()}` is a plain float32 checkpoint. Raises RuntimeError if the
        last step broke off; ValueError where two such parameters have one name.
        """
        self._check_last_step()
        self._refresh()
        return master_weights(self.param_groups, self.state)

    @torch.no_grad()
    def load_master_weights(self, values: Mapping[str, Tensor]) -> None:
        """Set parameters with `master_weights` and what they lack of float32, in place, to `values` by their names.

        `values` are float32 tensors laid out like the parameters, as `master_weights()` returns them; other names, such
        as those of a whole model's state dict, are not looked at. Raises ValueError or TypeError, with nothing changed,
        where a value is missing or does not fit.
        """
        self._refresh()
        load_master_weights(self.param_groups, self.state, values)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as two neighbours where it holds both matrices and other parameters.

        `param_group` is left as it is. Raises ValueError or TypeError, with nothing added, for settings or parameters
        that cannot work.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group must be a dict, got {type(param_group).__name__}")
        count = sum(len(group["params"]) for group in self.param_groups)
        groups, reasons = split_group(param_group, self.defaults, self._is_muon, count)
        before, first = len(self.param_groups), self._planned_for is None  # `first`: more follow, all are judged then
        try:
            for group in groups:
                super().add_param_group(group)
            if not first:
                self._refresh()
        except Exception:
            del self.param_groups[before:]
            self._forget_plan()
            raise
        self._reasons.update(reasons)
        added = () if first else self.param_groups[before:]
        for line in advice(routed(added, reasons)) + idle_keys(added, self.defaults["expert_keys"]):
            warnings.warn(line, stacklevel=2)

    def state_dict(self) -> dict[str, Any]:
        """Return the state and groups, of the parameters as they are now; of functions only that there was one.

        Raises RuntimeError if the last step broke off, or on a GPU, once, if ranks were not at one in it.
        """
        self._check_last_step()
        self._refresh()
        self._synchronize()
        saved = super().state_dict()
        return {**saved, "param_groups": [saved_group(group) for group in saved["param_groups"]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of what `state_dict` returned for the same parameters in the same order.

        What a group does not have, as those of `torch.optim.Muon`, and functions stay as they are here, and momentum
        keeps the dtype that it was saved in. Raises ValueError or TypeError, with nothing changed, where a group or
        state does not fit.
        """
        check_state_dict(state_dict)
        final: dict[str, Any] = {}
        # What others' hooks make of the dict counts, and theirs that come after loading see what was loaded.
        hooks = [
            self.register_load_state_dict_pre_hook(lambda _, loaded: final.update(checked(loaded, self.param_groups))),
            self.register_load_state_dict_post_hook(lambda _: self._copy_state(final), prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _copy_state(self, loaded: dict[str, Any]) -> None:
        """Copy the tensors of a state dict that was loaded: torch shares them, and casts momentum."""
        copy_loaded_(self.param_groups, self.state, loaded)
        self._broke_off = False

    def __getstate__(self) -> dict[str, Any]:
        self._synchronize()
        return {**super().__getstate__(), **{key: getattr(self, key) for key in self._kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Loading comes here too, after every hook and before anything is changed.
        if "param_groups" in self.__dict__:
            groups = loaded_groups(self.param_groups, state["param_groups"], state["state"])
            checked_parameters(groups, state["state"], self._replica_ranks)
            state = {**state, "param_groups": groups}
        super().__setstate__(state)
        self.__dict__.setdefault("_graphs", UpdateGraphs())  # which a copy makes for itself
        self._handle = handle_of(self)
        self._forget_plan()
        self._agreement.forget()

    def _take_step(self, closure: Optional[Callable[[], Any]]) -> Any:
        check_capture(self.param_groups, self._plan, self._clip is not None and self._clip.reports)
        self._check_last_step()
        check_closure(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refresh()
        check_gradients(self._planned_for[0], self._shapes, self.param_groups)
        if not self._said_idle and all(p.grad is None for p in self._planned_for[0]):
            self._said_idle = True
            warnings.warn(NO_GRADIENT, stacklevel=8)  # behind the wrappers of `step`
        # Both are set by GradScaler, and `found_inf` is an int where no parameter on this rank had a gradient.
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        scaling = GradientScaling(grad_scale, found_inf if isinstance(found_inf, Tensor) else None)
        scalings = self._agreement.begin_step(self._plan.terms, self.param_groups, scaling)
        self._broke_off = True  # unless what follows ends
        with ExitStack() as stack:
            for device_type in self._device_types:
                stack.enter_context(without_autocast(device_type))
            self._update_(scalings)
        self._broke_off = False
        for group in self.param_groups:
            group["rounding_step"] += group["stochastic_rounding"]  # True counts one step
        self._grad_scale = snapshot(scaling.grad_scale)
        self._agreement.end_step()
        return loss

    def _update_(self, scalings: Mapping[Optional[Ranks], GradientScaling]) -> None:
        """Momentum, orthogonalization and descent of all matrices, then the other parameters."""
        row_scales = {} if self._clip is None else self._clip.take_scales()
        recipes, workspace = Recipes(self.param_groups, scalings, self._graphs), self._workspace
        try:
            workspace.begin_step(self.state, row_scales)
            if workspace.exchanges or workspace.sums:
                self._norms = update_shared_(workspace, recipes, self._exchange.chunks_in_flight)
            else:
                self._norms = update_local_(workspace.batches, recipes)
            for batch in self._plan.fallback:
                update_fallback_(batch, self.param_groups[batch.group], self.state, scalings)
        finally:
            workspace.end_step()
        if row_scales:
            scaled = {source.tensor for source in workspace.parameters}
            scale_other_rows_(row_scales, self.state, scaled, self._replica_ranks, scalings)

    def _refresh(self) -> None:
        """Bring state, plan and workspace in line with parameters and settings, each only where something changed.

        Wrappers and `module.to()` replace or change parameters silently, so every step checks. Raises ValueError or
        TypeError for settings that cannot work, before anything is changed.
        """
        if checked_settings(self.param_groups) != self._checked:
            make_plain_(self.param_groups)
            self._checked = checked_settings(self.param_groups)
        params = [p for group in self.param_groups for p in group["params"]]
        # One flat list: thousands of tuples a step would keep the garbage collector busy. A frozen parameter whose
        # gradient somebody has set is updated all the same.
        trained = [p.requires_grad or p.grad is not None for p in params]
        facts = facts_of(params) + trained
        facts += [len(group["params"]) for group in self.param_groups] + planned_settings(self.param_groups)
        facts.append(choices())
        before, facts_before = self._planned_for or ([], None)
        if facts != facts_before or not all(map(operator.is_, params, before)) or self._lacks_state():
            self._make_plan()
            self._planned_for = params, facts
            self._shapes = [p.shape for p in params]
            self._device_types = {p.device.type for p in params}
            self._entries = entries(self.state)
        now = dependencies(self.param_groups, self.state)
        if self._workspace is None or now != self._workspace_for:
            self._synchronize()
            self._workspace = Workspace(self._plan, self.param_groups, self.state, self._release_grads)
            self._workspace_for = now

    def _lacks_state(self) -> bool:
        """Whether somebody has taken state away since the last step, as `optimizer.state.clear()` does."""
        before, self._entries = self._entries, entries(self.state)
        if self._entries == before:
            return False
        planned = {source.tensor for source in self._workspace.parameters} if self._workspace else ()
        return lacks_state(self.param_groups, self.state, planned)

    def _make_plan(self) -> None:
        self._forget_plan()
        named = [(group, *pair) for group in self.param_groups for pair in zip(names_of(group), group["params"])]
        bring_states_(self.param_groups, self.state, self._replica_ranks)
        clip = self._clip or "no qk_clip"
        common_line = f"{self._exchange} among {self._replica_ranks}, release_grads={self._release_grads}, {clip}"
        self._plan = make_plan(self.param_groups, self.state, self._exchange, self._replica_ranks, common_line)
        self._agreement.follow(self._plan.terms)
        if self._clip is not None:
            self._clip.follow([name for _, name, _ in named], [p for _, _, p in named], self._replica_ranks)
            self._clip.check_rows({name for group, name, _ in named if group["transposed"]})

    def _forget_plan(self) -> None:
        self._synchronize()
        self._planned_for, self._plan, self._workspace = None, Plan(), None

    def _synchronize(self) -> None:
        if self._workspace is not None:
            self._workspace.synchronize()

    def _check_last_step(self) -> None:
        """Raise RuntimeError if the last step broke off, or, once, if the ranks were not at one in it."""
        if self._broke_off:
            raise RuntimeError(
                "the last step broke off with an error: some parameters and states have moved and others have not, "
                "and neither a step nor a checkpoint of them would be right. On all ranks that share parameters, load "
                "parameters and state, either into a new optimizer (torch.distributed.checkpoint needs that) or into "
                "this one (load_state_dict). A new optimizer without a state begins with momentum zero"
            )
        read_all(self._plan.terms)
