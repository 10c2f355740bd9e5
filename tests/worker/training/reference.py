"""The same model in one process of plain torch: logprobs, losses, gradients and AdamW steps."""

import functools

import numpy as np
import torch

from plexrl.model.spec import ModelSpec
from plexrl.router.dispatch.reductions import loss_denominator
from plexrl.wire.operations import AdamParams, LossSpec
from plexrl.wire.tensors import Array, Arrays
from plexrl.worker.batches.losses import compute_loss
from plexrl.worker.batches.packing import micro_batches, unpack
from plexrl.worker.models import build_model, named_parameters

Tensors = dict[str, torch.Tensor]


@functools.cache
def model_of(spec: ModelSpec) -> torch.nn.Module:
    """As `transformers` builds it."""
    return build_model(spec)


def set_parameters(spec: ModelSpec, parameters: Tensors) -> Tensors:
    """Give the model these parameters; returns its own, whose names have to be the same."""
    own = dict(named_parameters(model_of(spec)))
    assert set(own) == set(parameters)
    with torch.no_grad():
        for name, value in parameters.items():
            own[name].copy_(value)
    return dict(own.items())


def logprobs_of(spec: ModelSpec, arrays: Arrays) -> tuple[torch.Tensor, Array]:
    """Logprobs of a whole batch as one padded micro-batch: `[B, L]` with its graph, packed
    `[T]`."""
    (batch,) = micro_batches(arrays, 1)
    model = model_of(spec)
    logits = model(input_ids=batch.tokens_BL, attention_mask=batch.valid_BL.long()).logits
    chosen = logits[:, :-1].log_softmax(-1).gather(-1, batch.tokens_BL[:, 1:, None])[..., 0]
    logprobs = torch.nn.functional.pad(chosen * batch.valid_BL[:, 1:], (1, 0))
    return logprobs, unpack([batch], [logprobs.detach()], len(arrays["tokens"]))


def gradients_of(
    spec: ModelSpec, parameters: Tensors, arrays: tuple[Arrays, ...], loss: LossSpec
) -> tuple[list[Array], list[float], Tensors]:
    """Logprobs and loss of every batch, and the gradients of the sum of their losses."""
    own = set_parameters(spec, parameters)
    for parameter in own.values():
        parameter.grad = None
    packed, losses = [], []
    for each in arrays:
        logprobs, values = logprobs_of(spec, each)
        (batch,) = micro_batches(each, 1)
        found = compute_loss(loss, logprobs, batch.per_token_BL, loss_denominator(loss, each))
        found.loss.backward()  # type: ignore[no-untyped-call]
        packed.append(values)
        losses.append(float(found.loss.detach()))
    gradients = {}
    for name, parameter in own.items():
        assert parameter.grad is not None
        gradients[name] = parameter.grad.clone()
    return packed, losses, gradients


def adamw(parameters: Tensors, gradients: Tensors, state: Tensors, params: AdamParams) -> Tensors:
    """Parameters and, under `<name>/<moment>`, optimizer state after a clipped step."""
    norm = global_norm(gradients)
    factor = min(1.0, params.grad_clip_norm / norm) if params.grad_clip_norm else 1.0
    own = {name: torch.nn.Parameter(value.clone()) for name, value in parameters.items()}
    optimizer = torch.optim.AdamW(
        own.values(),
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
    for name, parameter in own.items():
        parameter.grad = gradients[name] * factor
        optimizer.state[parameter] = {
            "step": state["step"].clone(),
            **{moment: state[f"{name}/{moment}"].clone() for moment in ("exp_avg", "exp_avg_sq")},
        }
    optimizer.step()
    found = {name: parameter.detach() for name, parameter in own.items()}
    for name, parameter in own.items():
        found["step"] = optimizer.state[parameter]["step"]
        for moment in ("exp_avg", "exp_avg_sq"):
            found[f"{name}/{moment}"] = optimizer.state[parameter][moment]
    return found


def global_norm(gradients: Tensors) -> float:
    """Over all elements, in float64."""
    return float(np.sqrt(sum(float(g.double().square().sum()) for g in gradients.values())))
