"""Parameter groups from a model: fused weights are cut into their matrices, embeddings and heads go to AdamW."""

from __future__ import annotations

import re
from fnmatch import translate
from typing import Any, Collection, Iterable, Optional

from torch import Tensor, nn

from ...explain.table import Explanation
from ...iteration import DTYPES
from ...kernels.user_warnings import warn_user
from ...parameters.advice import Uncut, advice, frozen_line, refused_line, remarks, uncut_lines
from ...parameters.names import bare_name, unparametrized
from ...parameters.roles import role_by_name
from ...parameters.routing import UNDECIDED, Route, decide, unique_parameters
from ...parameters.settings import OF_GROUPS
from ...parameters.synonyms import wish_of
from .layers import Cutting, check_cutting, cut_of, is_norm, stack_in
from .output_heads import adapted, layer_inside, output_heads, unwrapped
from .patterns import Patterns, check_patterns, overruled
from .previews import preview
from .routers import shown_by_modules
from .weighted_layers import CONVOLUTION

# The reason for a guessed head: it is the last linear layer of the network.
GUESSED_HEAD = "output_head:last_linear"


class _SomeGroups(list):
    """Groups for `Muon`, a list of dicts. `uncut` is for `explain()` of the Muon that gets them.

    Slices, and sums with other lists, have it, too; what `list` makes of it has not.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], uncut: Iterable[Uncut]):
        super().__init__(groups)
        self.uncut = list(uncut)

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        return _SomeGroups(part, self.uncut) if isinstance(index, slice) else part

    def __add__(self, others: list) -> _SomeGroups:
        return _SomeGroups(super().__add__(others), [*self.uncut, *getattr(others, "uncut", ())])

    def __radd__(self, others: list) -> _SomeGroups:
        return _SomeGroups(others, ()) + self if isinstance(others, list) else NotImplemented

    def __iadd__(self, others: Iterable) -> _SomeGroups:
        self.uncut = [*self.uncut, *getattr(others, "uncut", ())]  # a shallow copy shares the former list
        return super().__iadd__(others)

    def copy(self) -> _SomeGroups:
        return self[:]


class Groups(_SomeGroups):
    """What `groups_for` returns; printed as a table of the choices, whose rows are `choices.rows`."""

    def __init__(self, groups: Iterable[dict[str, Any]], choices: Explanation, uncut: Iterable[Uncut]):
        super().__init__(groups, uncut)
        self.choices = choices

    def __str__(self) -> str:
        return str(self.choices)

    def _repr_html_(self) -> str:
        return self.choices._repr_html_()


def groups_for(
    model: nn.Module,
    *,
    config: Any = None,
    heads: bool = True,
    gate_up: bool = True,
    patterns: Optional[Patterns] = None,
) -> Groups:
    """Return the trainable parameters of `model` as groups for `Muon`; print them to see each choice.

    Queries, keys and values are cut by head, in fused weights, grouped queries and latent attention too, if sizes show
    the heads. Gate and up are two matrices, and a stack of E experts is E matrices. Weights of transformers' `Conv1D`
    are (in, out). Modules decide before names: `nn.Embedding` is an embedding, `nn.LayerNorm` is a norm and no linear
    layer is, a `gate` beside experts is a router, a convolution is not a stack. The head is the one that methods of
    transformers' and timm's models return, or that a name shows, or else the last linear layer at the top level of the
    network, with the reason `output_head:last_linear`. Vectors, norms, biases, scales and the names and patterns in
    `model.no_weight_decay()` get no weight decay. Each group has a `role`, such as `queries` or `embedding`, by which
    you can find it to set its `lr`, and a `reason` for `explain()`. A group whose parameters may be stacks or
    convolutions has no branch yet: set `stacked` in it. Tied parameters come once, under their first name. Parameters
    of other dtypes than floating-point ones, such as complex ones, are left out, with a warning.

    Args:
        config: an object or a dict with sizes that modules lack, by their names in transformers' configs, as in
            `{"head_dim": 64, "num_key_value_heads": 4}`; None uses the `config` attributes of modules.
        heads: whether attentions are cut by head, or only into queries, keys and values.
        gate_up: whether gate and up are cut apart.
        patterns: settings of groups, `use_muon` and `role` for patterns of names, which override the choice, as in
            `{"*.c_attn.weight": {"split_rows": (64,) * 36, "transposed": True}}`; the first matching pattern counts.

    Raises TypeError if `model` is not a module, and for options of another kind; ValueError or TypeError for patterns
    that match nothing, have unknown keys or bad values, or ask Muon for a parameter that is not a matrix.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"groups_for needs a model, because it looks at its modules, got {type(model).__name__}")
    return chosen_groups(model, Cutting(config, heads, gate_up), patterns)


def chosen_groups(
    model: nn.Module, cutting: Cutting, patterns: Optional[Patterns], undecayed: Optional[Collection[str]] = None
) -> Groups:
    """Return the groups of `groups_for`; if `undecayed` is given, exactly these names get no weight decay."""
    check_cutting(cutting)
    patterns = {} if patterns is None else patterns
    all_named = list(model.named_parameters(remove_duplicate=False))
    named = [(name, p) for name, p in all_named if p.requires_grad and p.dtype in DTYPES]
    check_patterns(patterns, [name for name, _ in named])
    chooser = _Chooser(model, cutting, undecayed)
    groups: dict[str, dict[str, Any]] = {}
    rows: list[Route] = []
    for names, p in unique_parameters(named):
        settings = overruled(names, p, chooser.settings_of(names, p), patterns)
        groups.setdefault(repr(settings), {**settings, "params": []})["params"].append((names[0], p))
        rows.append(preview(names[:1], p, settings))
    by_pattern = {row.name for row in rows if row.reason.startswith("pattern:")}
    uncut = [each for each in chooser.uncut if each.name not in by_pattern]
    told = {row.name for row in rows if row.reason != UNDECIDED}
    refused = refused_line(all_named)
    notes = advice(rows, told) + remarks(rows) + uncut_lines(uncut) + frozen_line(all_named) + refused
    for line in refused:
        warn_user(line)
    return Groups(groups.values(), Explanation(rows, notes), uncut)


class _Chooser:
    """Chooses the group settings of parameters by the modules of one model, which may be inside wrappers."""

    def __init__(self, model: nn.Module, cutting: Cutting, undecayed: Optional[Collection[str]]):
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._cutting = cutting
        self._output_heads, self._shown = output_heads(model), shown_by_modules(model)
        self._hidden = {*self._output_heads.before, *self._shown.hidden}
        self._undecayed = undecayed
        self._undecayed_by_model = {bare_name(name) for each in unwrapped(model) for name in undecayed_names(each)}
        patterns = [translate(name) for name in self._undecayed_by_model if not {*"*?["}.isdisjoint(name)]
        self._undecayed_pattern = re.compile("|".join(patterns) or "(?!)")
        self.uncut: list[Uncut] = []  # of all parameters so far

    def settings_of(self, names: list[str], p: Tensor) -> dict[str, Any]:
        """Return the settings of a parameter's group; `names` are all names of a tied parameter."""
        owners_by_name = [self._owners(name) for name in names]
        branch, reason = self._branch(names, p, owners_by_name)
        settings: dict[str, Any] = {"role": _role(names[0], p, reason, owners_by_name[0][0])}
        if branch == "muon":
            cut = cut_of(names[0], p, owners_by_name[0], self._cutting)
            settings.update(cut.settings, role=cut.role if reason == "matrix" else reason)
            if cut.remark is not None:
                left_open = {key: cut.settings.get(key, OF_GROUPS[key]) for key in cut.left_open}
                self.uncut.append(Uncut(names[0], cut.role, cut.remark, left_open))
        if not self._decays(names, settings["role"]):
            settings["weight_decay"] = 0.0
        if reason != UNDECIDED:  # otherwise `stacked` or `expert_keys` decide the branch in Muon
            kept = reason == GUESSED_HEAD and settings["role"] == "output_head"
            settings.update(use_muon=branch == "muon", reason=reason if kept else settings["role"])
        return settings

    def _decays(self, names: list[str], role: str) -> bool:
        if self._undecayed is not None:
            return names[0] not in self._undecayed
        if role in ("vector", "norm", "bias", "scale"):
            return False
        bare = list(map(bare_name, names))
        return self._undecayed_by_model.isdisjoint(bare) and not any(map(self._undecayed_pattern.fullmatch, bare))

    def _branch(self, names: list[str], p: Tensor, owners_by_name: list[list[nn.Module]]) -> tuple[str, str]:
        """Return the branch and the reason; `owners_by_name` are, for each name, the modules around the parameter."""
        if wish_of(p) is not None:
            return decide(names, p)
        own_module = owners_by_name[0][0]
        around = {module for owners in owners_by_name for module in owners}
        if any(isinstance(adapted(module), (nn.Embedding, nn.EmbeddingBag)) for module in around):
            return "adamw", "embedding"
        if p.ndim > 1 and is_norm(own_module):
            return "adamw", "norm"
        # Weights of an adapter around the head are inside it, too.
        if not around.isdisjoint(self._output_heads.told) and around.isdisjoint(self._hidden):
            return "adamw", "output_head"
        if not around.isdisjoint(self._output_heads.guessed):
            return "adamw", GUESSED_HEAD
        if _embeds_patches(names[0], owners_by_name[0]):
            return "adamw", "embedding"
        if "router" in type(own_module).__name__.lower() or not around.isdisjoint(self._shown.routers):
            return "adamw", "router"
        depth = next((depth for depth, module in enumerate(owners_by_name[0]) if module in self._hidden), None)
        if depth is not None:  # in a hidden layer, although its name says head, router or norm
            names = [".".join(unparametrized(name).split(".")[-depth - 1 :]) for name in names]
        if _is_row(names[0], p, own_module) and (role_by_name(names[0], p.shape) or "").startswith("output_head"):
            return "adamw", "output_head"
        return decide(names, p, None, stack_in(names[0], p, own_module))

    def _owners(self, name: str) -> list[nn.Module]:
        """Return the modules around a parameter, the innermost first."""
        parts = unparametrized(name).split(".")[:-1]
        return [self._modules[".".join(parts[:depth])] for depth in range(len(parts), -1, -1)]


def _embeds_patches(name: str, owners: list[nn.Module]) -> bool:
    """Whether the class of a module around a parameter shows that it embeds patches.

    Numbered modules, as between the stages of PVT, do not read pixels.
    """
    inner = list(zip(unparametrized(name).split(".")[-2::-1], owners[:2]))
    if inner and inner[0][0] == "text_proj":  # CogVideoX's, beside the layer that reads patches
        return False
    modules = [part for part, owner in inner if "patchembed" in type(owner).__name__.lower()]
    return bool(modules) and not (re.search(r"\.\d", name) or re.search(r"([2-9]|\d\d)$", modules[0]))


def undecayed_names(model: nn.Module) -> Collection[str]:
    """Return the names, or patterns of names, that `model.no_weight_decay()` returns; TypeError for anything else."""
    names = getattr(model, "no_weight_decay", None)
    if names is None:
        return ()
    names = names() if callable(names) else names
    if not isinstance(names, (set, frozenset, list, tuple, dict)) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"no_weight_decay must return names, such as the set of timm's method, got {names!r}")
    return names


def _role(name: str, p: Tensor, reason: str, owner: nn.Module) -> str:
    """Return the role of a parameter of the fallback: by its modules, else by its name, else routing's `reason`."""
    is_outer = reason.startswith(("embedding", "output_head"))
    if sum(size > 1 for size in p.shape) < 2 and not (is_outer and _is_row(name, p, owner)):
        return "vector"
    told = reason.startswith(("embedding", "output_head", "norm", "router"))
    return (reason if told else role_by_name(name, tuple(p.shape)) or reason).split(":")[0]


def _is_row(name: str, p: Tensor, owner: nn.Module) -> bool:
    """Whether a parameter is the weight of a layer of one output or a table of one row, which are no vectors."""
    is_layer = isinstance(layer_inside(owner), (nn.Linear, CONVOLUTION, nn.Embedding, nn.EmbeddingBag))
    is_weight = unparametrized(name).rpartition(".")[2] == "weight"
    return is_layer and is_weight and p.ndim > 1 and p.shape[0] == 1 < p.numel()
