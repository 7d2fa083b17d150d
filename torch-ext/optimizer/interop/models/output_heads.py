"""Which modules of a model compute its outputs: by the model's methods, by names, or the last linear layer."""

from __future__ import annotations

from itertools import chain
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence

from torch import Tensor, nn

from ...parameters.names import MODEL_WRAPPERS
from ...parameters.roles import lora_factor, predicts_further_tokens, role_by_name
from .attributes import attribute
from .weighted_layers import widths_of

# Methods of transformers' and timm's models that return the output module.
_TELL = ("get_output_embeddings", "get_classifier")
# Attributes in which adapters keep the layer that they adapt or replace.
_ADAPTED = ("base_layer", "original_module")
# Names of heads that say nothing of a layer's place: with a later layer behind them they are hidden.
_ANY_LINEAR = ("fc", "linear")


class OutputHeads(NamedTuple):
    """Outputs that a model reports (`told`) or that are `guessed`; `before`: hidden layers that names call heads."""

    told: List[nn.Module]
    guessed: List[nn.Module]
    before: List[nn.Module]


def output_heads(model: nn.Module) -> OutputHeads:
    """Return the output modules of `model`, found without running it.

    If neither a method of the model nor a name shows the head, it is guessed: the last linear layer at the top level of
    the network, and those next to it with the same input, or at the end of a sequence like its own. Nothing is guessed
    for transformers' models without a head, for torch's own layers, and for networks with a single matrix.
    """
    told = [head for module in model.modules() for head in _told(module)]
    network = _network(model)
    apart = [head for head in told if not isinstance(head, nn.AdaptiveLogSoftmaxWithLoss)]
    heads = apart + _named_heads(network)
    before = [layer for head in heads for layer in _layers_before(head, heads)] + _read_by_later(network)
    guessed = [] if told or _has_named_head(model, before) else _last_layers(network)
    return OutputHeads(told, guessed if _fits_single_outputs(guessed, network) else [], before)


def adapted(module: nn.Module) -> nn.Module:
    """Return the layer inside an adapter, such as PEFT's around an `nn.Embedding`; other modules as they are."""
    inside = (attribute(module, key) for key in _ADAPTED)
    layer = next((layer for layer in inside if isinstance(layer, nn.Module)), None)
    return module if layer is None else adapted(layer)


def without_wrappers(owners: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules around a parameter, the innermost first, without wrappers and adapters."""
    keys = (*_ADAPTED, *MODEL_WRAPPERS)
    pairs = zip(owners[1:], owners)
    kept = [outer for outer, inner in pairs if not any(attribute(outer, key) is inner for key in keys)]
    return [owners[0], *kept]


def unwrapped(model: nn.Module) -> list[nn.Module]:
    """Return the model and the models that it wraps, from the outside inwards."""
    models = [model]
    while True:
        inside = (attribute(models[-1], key) for key in MODEL_WRAPPERS)
        model = next((module for module in inside if isinstance(module, nn.Module)), None)
        if model is None or any(model is m for m in models):  # or a wrapper that names itself
            return models
        models.append(model)


def layer_inside(module: nn.Module) -> nn.Module:
    """Return the layer inside wrappers and adapters, such as one that is compiled alone."""
    return adapted(unwrapped(module)[-1])


def _told(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the output modules with parameters that the model's methods return, and torch's own output layer."""
    if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
        yield module
    for method in _TELL:
        try:
            head = getattr(module, method)()
        except Exception:  # models without a head raise errors of any kind
            continue  # also a method that needs arguments, such as the name of one of several heads
        # timm's distilled models return two.
        for each in head if isinstance(head, (tuple, list)) else (head,):
            if isinstance(each, nn.Module) and _holds(each):
                yield each


def _network(model: nn.Module) -> nn.Module:
    """Return the module whose children are the parts of the network, without wrappers and single-child containers."""
    network = unwrapped(model)[-1]
    parts = _parts(network)
    alone = len(parts) == 1 and not network._parameters and _parts(parts[0])
    return _network(parts[0]) if alone and not _has_one_block(network) else network


def _has_one_block(network: nn.Module) -> bool:
    """Whether a list or a dict of modules has one member, a block: unlike a network, it writes as much as it reads."""
    parts = _parts(network) if isinstance(network, (nn.ModuleList, nn.ModuleDict)) else []
    sizes = _sizes(parts[0]) if len(parts) == 1 else []
    return bool(sizes) and sizes[0][0] == sizes[-1][1]


def _parts(module: nn.Module) -> list[nn.Module]:
    """Return the children that hold parameters, in the order in which they were registered."""
    return [child for child in module.children() if _holds(child)]


def _holds(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_named_head(model: nn.Module, hidden: Sequence[nn.Module]) -> bool:
    """Whether a name shows the model's head; a head of one output, and those for further tokens, come beside it."""
    others = {p for layer in hidden for p in layer.parameters()}
    named = [(name, p) for name, p in model.named_parameters() if p not in others and not predicts_further_tokens(name)]
    return any(_is_matrix(p) and _names_a_head(name, tuple(p.shape)) for name, p in named)


def _fits_single_outputs(guessed: Sequence[nn.Module], network: nn.Module) -> bool:
    """Whether a guess has one of the parts of one output that are heads by name, if there are any.

    Otherwise the order of registration, by which it was made, is not that of the layers.
    """
    named = [part for name, part in network.named_children() if _names_a_head(f"{name}.weight")]
    single = [part for part in named if (widths_of(layer_inside(part)) or (0, 0))[1] == 1]
    return not single or any(part in guessed for part in single)


def _is_matrix(p: Tensor) -> bool:
    return p.ndim > 1 and min(p.shape[:2]) > 1


def _named_heads(network: nn.Module) -> list[nn.Module]:
    """Return the parts that are heads by name, such as torchvision's `classifier`, and not lists of several heads."""
    parts = [each for each in network.named_children() if not isinstance(each[1], (nn.ModuleList, nn.ModuleDict))]
    layers = [f"{name}.{'0' if isinstance(part, nn.Sequential) else 'layer'}.weight" for name, part in parts]
    return [part for (_, part), layer in zip(parts, layers) if _names_a_head(layer)]


def _names_a_head(name: str, shape: tuple[int, ...] = (1, 1)) -> bool:
    return (role_by_name(name, shape) or "").startswith("output_head")


def _layers_before(head: nn.Module, heads: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the hidden layers of a head: all linear ones of a sequence except the last, and all that feed a later one.

    A layer feeds a later one that reads as many features as it writes. One inside a part feeds the layers among `heads`
    outside of it, too, as ModernBERT's `head.dense` does its `decoder`.
    """
    parts = _parts(head) if isinstance(head, nn.Sequential) else []
    before = [part for part in parts if widths_of(layer_inside(part)) is not None][:-1]
    layers = [
        (name, module, widths)
        for name, module in head.named_modules()
        if lora_factor(name) is None and name.rpartition(".")[2] not in _ADAPTED
        if (widths := widths_of(layer_inside(module))) is not None
    ]
    beside = [widths_of(layer_inside(other)) for other in heads if other not in set(head.modules())]
    for place, (name, module, (_, written)) in enumerate(layers):
        # Inside of three modules, so that only names count that mean a head at any depth.
        is_head = _names_a_head(f"a.b.c.{name.rpartition('.')[2]}.weight")
        later = [widths for _, _, widths in layers[place + 1 :]] + (beside if name else [])
        if not is_head and any(widths is not None and widths[0] == written for widths in later):
            before.append(module)
    return before


def _read_by_later(network: nn.Module) -> list[nn.Module]:
    """Return the linear layers of `network` with a name of any linear layer that write what a later part reads.

    They come with wrappers and adapters, whose factors are in the place of the layer, too.
    """
    parts = [(name, child, _sizes(child)) for name, child in network.named_children() if _holds(child)]
    return [
        child
        for place, (name, child, _) in enumerate(parts)
        if name in _ANY_LINEAR and _is_linear(child)
        if any(later and later[0][0] == layer_inside(child).out_features for _, _, later in parts[place + 1 :])
    ]


def _sizes(part: nn.Module) -> list[tuple[int, int]]:
    """Return what each linear layer in a part reads and writes, in the order of registration."""
    layers = (layer for layer in part.modules() if isinstance(layer, nn.Linear) and hasattr(layer, "in_features"))
    return [(layer.in_features, layer.out_features) for layer in layers]


def _linear_end(part: nn.Module) -> Optional[nn.Module]:
    """Return the last layer with parameters of a part, also in a sequence inside of it; None if it is not linear."""
    while isinstance(part, (nn.Sequential, nn.ModuleList)) and (parts := _parts(part)):
        part = parts[-1]
    return part if _is_linear(part) else None


def _last_layers(network: nn.Module) -> list[nn.Module]:
    """Return the last linear layers of `network`; an empty list if it does not end in one."""
    if type(network).__module__.startswith("torch.nn.") and not isinstance(network, (nn.Sequential, nn.ModuleList)):
        return []  # a layer of torch, or a container without an order
    if _has_one_block(network) or attribute(network, "base_model") is network:
        return []  # the latter is how transformers marks models without a head
    parts, beside = _parts(network), []
    while parts and isinstance(parts[-1], (nn.Sequential, nn.ModuleList)):
        beside += [] if isinstance(network, nn.Sequential) else _ends_beside(parts[-1], parts[-2::-1])
        network = parts[-1]
        parts = [*parts[:-1], *_parts(network)]
    if not parts or not _is_linear(parts[-1]):
        return []
    last = parts[-1]
    beside += [] if isinstance(network, nn.Sequential) else _beside(layer_inside(last), parts[-2::-1])
    rest = [part for part in parts if part not in (last, *beside)]
    return [last, *beside] if any(_is_matrix(p) for part in rest for p in part.parameters()) else []


def _ends_beside(last: nn.Module, before: list[nn.Module]) -> list[nn.Module]:
    """Return the last layers of the sequences right before the last one that are like it, such as a second critic.

    Up to their last layers both have the same ones, and the last one does not read what one of the others writes, nor
    what all of them write side by side.
    """
    layers: list[nn.Module] = []
    written = 0
    widths, kinds = list(chain(*_sizes(last))), list(map(type, last.children()))
    for part in before if isinstance(last, nn.Sequential) and len(widths) > 2 else ():
        its_widths = list(chain(*_sizes(part)))
        alike = list(map(type, part.children())) == kinds and its_widths[:-1] == widths[:-1]
        end = _linear_end(part)
        if not alike or its_widths[0] == its_widths[-1] or end is None:
            break
        layers.append(end)
        written += its_widths[-1]
    return [] if layers and written == widths[0] else layers


def _beside(last: Any, before: list[nn.Module]) -> list[nn.Module]:
    """Return the layers right before the last one with the same input, such as a policy next to a value."""
    layers: list[nn.Module] = []
    for part in before:
        layer = layer_inside(part)
        same = _is_linear(part) and layer.in_features == last.in_features != layer.out_features
        if not same:
            break
        layers.append(part)
    return layers


def _is_linear(module: nn.Module) -> bool:
    return isinstance(layer_inside(module), nn.Linear)
