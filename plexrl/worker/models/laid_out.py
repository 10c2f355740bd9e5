"""A model whose parameters are on `meta`, and the source from which their boxes are read.

A rank lays its state out first, gets memory for it, and then reads only its own boxes: from the
model's safetensors files, or drawn again from the model's seed. So no rank ever holds a whole
model, except if only `transformers` can convert the files' tensors: it does so for all at once.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from plexrl.model.spec import VALUE_HEAD, ModelSpec
from plexrl.worker.models.build import (
    build_model,
    model_of_config,
    named_parameters,
    refusals_explained,
    refuse_value_head,
)
from plexrl.worker.models.initial_draws import InitialDraws
from plexrl.worker.models.weight_files import Index, PublishedWeights, WeightFiles

LOG = logging.getLogger(__name__)


class Weights(Protocol):
    """Where a model's initial weights come from."""

    def read(self, name: str, index: Index) -> torch.Tensor:
        """A box of a parameter, as float32 on the CPU, for the caller to copy.

        Raises:
            PlexRLError: it cannot be read.
        """
        ...

    def forget(self) -> None:
        """Free what was kept from earlier reads."""
        ...


class LaidOutModel:
    """A model in evaluation mode. Its buffers have their values."""

    def __init__(self, model: Any, weights: Weights) -> None:
        self.model = model
        self._weights = weights

    def read(self, name: str, index: Index) -> torch.Tensor:
        """A box of the parameter with that canonical name. Raises as `Weights.read`."""
        return self._weights.read(name, index)

    def forget(self) -> None:
        """Free what was kept from earlier reads."""
        self._weights.forget()

    @contextmanager
    def streamed(self, *, at_once: bool) -> Iterator[None]:
        """While the block runs, the model can be called. Each module gets its parameters when it is
        called, and they are dropped after it; with `at_once`, all of them before the call."""
        names = {id(parameter): name for name, parameter in named_parameters(self.model)}
        own = {each: dict(each._parameters) for each in self.model.modules()}
        handles: list[Any] = []

        def bring(module: nn.Module, _: Any = None) -> None:
            for key, parameter in own[module].items():
                if parameter is not None:
                    whole = self.read(names[id(parameter)], (slice(None),) * parameter.dim())
                    module._parameters[key] = nn.Parameter(whole, requires_grad=False)

        def drop(module: nn.Module, *_: Any) -> None:
            module._parameters.update(own[module])

        try:
            for module in self.model.modules():
                if at_once:
                    bring(module)
                else:
                    handles.append(module.register_forward_pre_hook(bring))
                    handles.append(module.register_forward_hook(drop))
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module in self.model.modules():
                drop(module)

    def replace_parameters(self, values: Mapping[str, torch.Tensor]) -> None:
        """Let these tensors be the parameters, wherever the model uses them, and move the model's
        buffers to their device."""
        named = dict(named_parameters(self.model))
        replaced = {
            id(named[name]): nn.Parameter(value, requires_grad=False)
            for name, value in values.items()
        }
        device = next(iter(values.values())).device
        for module in self.model.modules():
            for own, parameter in module._parameters.items():
                if id(parameter) in replaced:
                    module._parameters[own] = replaced[id(parameter)]
            for own, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[own] = buffer.to(device)


def lay_out_model(spec: ModelSpec) -> LaidOutModel:
    """The model of `spec`, as `build_model` makes it, with parameters on `meta`.

    Raises:
        InvalidRequestError: as `build_model`.
    """
    with refusals_explained():
        model: Any
        if spec.path is None:
            with parameters_on_meta(), InitialDraws() as draws:
                model = model_of_config(spec)
            if all(draws.knows(parameter) for _, parameter in named_parameters(model)):
                return LaidOutModel(model, _Drawn(model, draws))
            return _whole(spec, "its initial weights are not drawn by torch's functions")
        with parameters_on_meta():
            model = model_of_config(spec)
        files = WeightFiles(Path(spec.path))
        refuse_value_head(spec, files.shapes)
        shapes = {name: tuple(each.shape) for name, each in named_parameters(model)}
        is_new = spec.head == "value" and VALUE_HEAD not in files.shapes
        zeros = frozenset({VALUE_HEAD} if is_new else ())
        weights = PublishedWeights(files, str(model.config.model_type), shapes, zeros)
        if not weights.are_complete or _has_others(model, files):
            return _whole(spec, "its files hold other tensors than the model has parameters")
        _read_generation_config(model, spec)
    return LaidOutModel(model, weights)


class _Drawn:
    """Weights drawn from the model's seed."""

    def __init__(self, model: nn.Module, draws: InitialDraws) -> None:
        self._parameters = dict(named_parameters(model))
        self._draws = draws
        self._last: tuple[str, torch.Tensor] | None = None
        """A framework may read a parameter in many boxes, one after the other."""

    def read(self, name: str, index: Index) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None
            self._last = (name, self._draws.draw(self._parameters[name]))
        return self._last[1][index]

    def forget(self) -> None:
        self._last = None


class _Whole:
    """Weights of a model that is built at once, and again if it was forgotten."""

    def __init__(self, spec: ModelSpec, model: nn.Module) -> None:
        self._spec = spec
        self._parameters: dict[str, torch.Tensor] = dict(named_parameters(model))

    def read(self, name: str, index: Index) -> torch.Tensor:
        if not self._parameters:
            self._parameters = dict(named_parameters(build_model(self._spec)))
        return self._parameters[name].data[index]

    def forget(self) -> None:
        self._parameters = {}


def whole_model(spec: ModelSpec) -> LaidOutModel:
    """As `build_model`: the parameters have their values until they are replaced."""
    model = build_model(spec)
    return LaidOutModel(model, _Whole(spec, model))


def _whole(spec: ModelSpec, reason: str) -> LaidOutModel:
    LOG.info("the whole model is read, because %s", reason)
    model = build_model(spec)
    weights = _Whole(spec, model)
    # A tied parameter is one object, and stays one.
    moved = {id(parameter): _on_meta(parameter) for parameter in model.parameters()}
    for module in model.modules():
        for own, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[own] = moved[id(parameter)]
    return LaidOutModel(model, weights)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within the block, modules get their parameters on `meta`."""

    def move(_: nn.Module, __: str, parameter: nn.Parameter | None) -> Any:
        # The memory was only reserved: nothing has been written to it.
        return None if parameter is None or parameter.is_meta else _on_meta(parameter)

    handle = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        handle.remove()


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)


def _has_others(model: nn.Module, files: WeightFiles) -> bool:
    """Whether the model has state besides its parameters under their canonical names.

    A tied parameter that the files hold twice may be untied by `transformers`.
    """
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    aliases = every - {name for name, _ in named_parameters(model)}
    persistent = set(model.state_dict(keep_vars=True)) - every
    return bool(aliases & set(files.shapes) or persistent)


def _read_generation_config(model: Any, spec: ModelSpec) -> None:
    from transformers import GenerationConfig

    if getattr(model, "generation_config", None) is None:
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(spec.path, local_files_only=True)
    except OSError:
        LOG.debug("%s has no generation config", spec.path)
