"""The names of the Motif kernel (motif-technologies/optimizer on the Hub), each with its meaning there.

Replace `get_kernel("motif-technologies/optimizer")` by `get_kernel(...).compat`; the rest of a script needs no change.
That includes `optimizer.muon.get_default_muon_param_groups`, since this module stands in for all modules of the kernel.
Names that have no meaning here raise AttributeError, which says what to write instead.

Source: the kernel's muon.py, newton_schulz.py and matmul_transpose_triton.py.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, Callable, Iterable, Mapping, Optional, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..kernels.matmul_transpose import matmul_transpose
from ..muon import Muon as MuonOfPackage
from ..parameters.groups import params_with_names
from ..parameters.names import bare_name
from ..plan.exchange_options import ExchangeOptions
from ..polar.factors import orthogonalize
from ..schedules import Schedule, polar_express

# The kernel adds this to the norm of a sum of gradients.
_EPS = 1e-7
_NO_MATRICES = {"embed_tokens", "lm_head", "tok_embeddings", "output"}
_MODULES = ("muon", "newton_schulz", "matmul_transpose_triton", "core")
_CLIP = "give clip_config to Muon and qk_logits to its step; QK-clip does the rest"
_OFFLOAD = "steps fetch momentum to the device by themselves: only call turn_on_cpu_offload()"
_SHARDS = "ranks of shards are found automatically: give Muon the parameters as they are"
_INSTEAD = {
    "set_ns_compile": "torch.compile is not used here: leave it out",
    "COMM_DTYPE": "orthogonalize(G, dtype=torch.bfloat16) and Muon(..., ns_dtype=torch.bfloat16) choose the dtype",
    "DEFAULT_CHUNK_SIZE_RATIO": "write exchange=ExchangeOptions(chunk_bytes=...) for this package's Muon",
    "adjust_lr_for_muon": "print(Muon(...).explain()) has each multiplier",
    **dict.fromkeys(("parse_qk_layer", "get_qk_clip_info", "QKClipInfo", "compute_scales", "qk_clip"), _CLIP),
    **dict.fromkeys(("construct_shard_mesh", "get_slices_of_dtensor"), _SHARDS),
    **dict.fromkeys(("CPUOffloadPool", "set_param_tags", "reload_group", "reload_untagged", "wait_reload"), _OFFLOAD),
}


class Muon(MuonOfPackage):
    """Muon with the arguments and defaults of the Motif kernel.

    It is the package's `Muon` with `adjust_lr_fn="match_rms_adamw"` and the kernel's coefficients. Momentum is an
    average, which is (1 - momentum) times the kernel's sum; the polar factor is the same. The kernel adds 1e-7 to the
    norm of the sum; here (1 - momentum) 1e-7 is a lower bound for the norm of the average. Parameters with more than
    two dimensions are stacks of matrices. `import_state(..., source="motif")` loads the kernel's checkpoints.

    Args:
        params: groups with `use_muon`, and `names` of their parameters, as made by `get_default_muon_param_groups`.
        lr: learning rate of both branches.
        none_grad: whether to set `.grad` of a matrix to None as soon as it has been read.
        debug: only False; use `print(opt.explain())`.
        clip_config: settings of QK-clip, which also needs `qk_logits` in each `step`. Without `q_indices` and
            `k_indices` there is no clipping. If one is absent or None, it follows from the number of heads.
        warmup_step: number of chunks of matrices that are sent ahead; more than two have no effect here.
        chunk_size: only -1, since chunks are measured in bytes here.
        use_distributed_muon: only False; its results are the same.
        expert_keys: components of the names of stacks; it has no effect, since all 3-d parameters are stacks here.

    Raises ValueError for groups without `use_muon`, for other numbers of `names` than of parameters, and for
    unsupported values; and the errors of `Muon`.
    """

    def __init__(
        self,
        params: Iterable[Mapping[str, Any]],
        lr: float | Tensor = 1e-3,
        weight_decay: float | Tensor = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        none_grad: bool = True,
        debug: bool = False,
        clip_config: Optional[Mapping[str, Any]] = None,
        warmup_step: int = 5,
        chunk_size: int = -1,
        use_distributed_muon: bool = False,
        expert_keys: Optional[Sequence[str]] = None,
    ):
        _check_unused(debug, chunk_size, use_distributed_muon)
        settings = dict(lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, ns_steps=ns_steps)
        indices = [(clip_config or {}).get(key) for key in ("q_indices", "k_indices")]
        super().__init__(
            params,
            **settings,
            adamw_betas=adamw_betas,
            adamw_eps=adamw_eps,
            ns_coefficients=_schedule(),
            adjust_lr_fn="match_rms_adamw",
            stacked=True,
            qk_clip=clip_config if any(indices) else None,
            release_grads=none_grad,
            exchange=ExchangeOptions(chunks_in_flight=1) if warmup_step < 2 else None,
        )

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add a group of the kernel, with `use_muon` and `names`; raises as the constructor does."""
        super().add_param_group(_group(len(self.param_groups), param_group, self.defaults["momentum"]))

    def step(self, closure: Optional[Callable[[], Any]] = None, qk_logits: Optional[Mapping[int, Tensor]] = None):
        """Update every parameter that has a gradient; call `closure` first, if given, and return its result.

        `qk_logits` are the largest logits (heads,) of attention layers by number, in the order of `clip_config`. They
        raise ValueError if `clip_config` has no indices. The errors of the package's `Muon.step` apply too.
        """
        if qk_logits and self._clip is None:
            raise ValueError("qk_logits need a clip_config with q_indices and k_indices, and this Muon has none")
        for layer, logits in (qk_logits or {}).items():
            self.observe_qk_logits(layer, logits.full_tensor() if isinstance(logits, DTensor) else logits)
        return self._step_without_hooks(closure)

    def turn_on_cpu_offload(self) -> None:
        """Keep momentum buffers in host memory from the next step on."""
        self._set_offload(True)

    def turn_off_cpu_offload(self) -> None:
        """Keep momentum buffers on the device from the next step on."""
        self._set_offload(False)

    def _set_offload(self, offload: bool) -> None:
        for group in self.param_groups:
            group["offload"] = offload

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(_instead(name, f"Muon of compat has no attribute {name!r}"))


def default_is_muon(name: str, x: Tensor, expert_keys: Optional[Sequence[str]] = None) -> bool:
    """Return whether the kernel gives a parameter to Muon by default: by its dimensions and the components of its name.

    A stack of experts has one dimension more than its matrices. Unlike the package's own routing, this gives Muon
    convolutions, and heads and embeddings not called embed_tokens, tok_embeddings, lm_head or output.
    """
    dimensions = x.ndim - is_expert_param(name, expert_keys)
    return dimensions >= 2 and _NO_MATRICES.isdisjoint(normalize_fqn(name).split("."))


def get_default_muon_param_groups(
    model: nn.Module,
    is_muon_func: Callable[..., bool] = default_is_muon,
    expert_keys: Optional[Sequence[str]] = None,
) -> list[dict[str, Any]]:
    """Return the trainable parameters of `model` as two groups with `names`: Muon's, then AdamW's.

    `is_muon_func` is called with name and parameter, and with `expert_keys` if these are given.
    """
    rest = () if expert_keys is None else (expert_keys,)
    groups: list[dict[str, Any]] = [{"params": [], "names": [], "use_muon": use_muon} for use_muon in (True, False)]
    for name, p in model.named_parameters():
        if p.requires_grad:
            group = groups[0 if is_muon_func(name, p, *rest) else 1]
            group["params"].append(p)
            group["names"].append(name)
    return groups


def is_expert_param(name: str, expert_keys: Optional[Sequence[str]] = None) -> bool:
    """Return whether a component of a parameter's name is one of `expert_keys`."""
    return not set(expert_keys or ()).isdisjoint(normalize_fqn(name).split("."))


def normalize_fqn(name: str) -> str:
    """Return a parameter's name in the model itself, without the components that wrappers add."""
    return bare_name(name)


def zeropower_via_newtonschulz5(G: Tensor, steps: int) -> Tensor:
    """Return the approximate polar factor of a matrix G (m, n), in its dtype, with the kernel's coefficients.

    The kernel accepts bfloat16 only and iterates in it. Here any floating dtype is accepted, and the iteration runs in
    `iteration.default_work_dtype`. The kernel adds 1e-7 to the norm; here 1e-7 is the norm's lower bound. Raises
    ValueError for another number of dimensions, and the errors of `orthogonalize`.
    """
    return _zeropower(G, steps, 2)


def zeropower_via_newtonschulz5_batched(G: Tensor, steps: int) -> Tensor:
    """Return the result of `zeropower_via_newtonschulz5` for each matrix of G (E, m, n)."""
    return _zeropower(G, steps, 3)


def matmul_transpose_assign(d_in: Tensor, d_out: Tensor) -> None:
    """Write `d_in` `d_in`ᵀ (..., m, m) into `d_out` in place; raises the errors of `matmul_transpose`."""
    matmul_transpose(d_in, out=d_out)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return sys.modules[__name__]
    raise AttributeError(_instead(name, f"compat has no {name!r}"))


def _zeropower(G: Tensor, steps: int, dimensions: int) -> Tensor:
    if G.ndim != dimensions:
        raise ValueError(f"need a tensor of {dimensions} dimensions, got {tuple(G.shape)}")
    return orthogonalize(G, _schedule(), steps, eps=_EPS)


@lru_cache(maxsize=1)
def _schedule() -> Schedule:
    """Return the kernel's coefficients for ten steps; the last ones are repeated in further steps."""
    return polar_express(lower=1e-3, steps=10, safety=1e-2, cushion=0.02)


def _group(position: int, group: Any, momentum: float) -> dict[str, Any]:
    """Return a group of the kernel as a group for `Muon`.

    Raises ValueError if it has no `use_muon`, and ValueError or TypeError for `names` that do not fit its `params`.
    """
    if not isinstance(group, Mapping) or group.get("use_muon") is None:
        raise ValueError(
            f"group {position} does not set use_muon: write Muon(get_default_muon_param_groups(model), ...), or the "
            "package's own Muon(model.named_parameters(), ...), which decides by itself"
        )
    changed = {key: value for key, value in group.items() if key not in ("names", "none_grad")}
    if "names" in group:
        changed["params"] = params_with_names(group, "names")
    return {"eps": (1 - group.get("momentum", momentum)) * _EPS, **changed} if group["use_muon"] else changed


def _check_unused(debug: bool, chunk_size: int, use_distributed_muon: bool) -> None:
    if debug:
        raise ValueError("debug=True prints nothing here: leave it out, and print(opt.explain())")
    if chunk_size != -1:
        raise ValueError(
            f"chunk_size={chunk_size} counts parameters, but chunks are measured in bytes here: leave it out, or write "
            "exchange=ExchangeOptions(chunk_bytes=...) for the package's own Muon"
        )
    if use_distributed_muon:
        raise ValueError("use_distributed_muon=True is a slower way to the same result: leave it out")


def _instead(name: str, message: str) -> str:
    return f"{message}: {_INSTEAD[name]}" if name in _INSTEAD else message
