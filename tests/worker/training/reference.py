"""The same model in one process of plain torch: logprobs, losses, gradients and AdamW steps.

What computes in bfloat16 is compared with plain torch in bfloat16: with a cast of the parameters
alone, gradients of some batches differ by 6 % of the largest one from those in float32.
"""

import functools
from typing import Any

import numpy as np
import torch

from plexrl.model.spec import ModelSpec
from plexrl.router.dispatch.reductions import loss_denominator
from plexrl.wire.operations import AdamParams, LossSpec
from plexrl.wire.tensors import Array, Arrays
from plexrl.worker.batches.losses import compute_loss
from plexrl.worker.batches.packing import MicroBatch, micro_batches, unpack
from plexrl.worker.models import build_model, named_parameters

Tensors = dict[str, torch.Tensor]


@functools.cache
def model_of(spec: ModelSpec, compute_dtype: str = "float32") -> torch.nn.Module:
    """As `transformers` builds it, with parameters of this dtype; buffers stay in float32."""
    model = build_model(spec)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, compute_dtype))
    return model


def set_parameters(spec: ModelSpec, parameters: Tensors, compute_dtype: str = "float32") -> Tensors:
    """Give the model these parameters; returns its own, whose names have to be the same."""
    own = dict(named_parameters(model_of(spec, compute_dtype)))
    assert set(own) == set(parameters)
    with torch.no_grad():
        for name, value in parameters.items():
            own[name].copy_(value)
    return dict(own.items())


def logprobs_of(
    spec: ModelSpec, arrays: Arrays, compute_dtype: str = "float32"
) -> tuple[torch.Tensor, Array]:
    """Logprobs of a whole batch as one padded micro-batch: `[B, L]` with its graph, packed
    `[T]`."""
    batch, all_BPV = distributions_of(spec, arrays, compute_dtype)
    chosen = all_BPV.gather(-1, batch.tokens_BL[:, 1:, None])[..., 0]
    logprobs = torch.nn.functional.pad(chosen * batch.valid_BL[:, 1:], (1, 0))
    return logprobs, unpack([batch], [logprobs.detach()], len(arrays["tokens"]))


def values_of(spec: ModelSpec, arrays: Arrays, compute_dtype: str) -> tuple[torch.Tensor, Array]:
    """Values of a whole batch, as `logprobs_of`: of a token, the head at the token before it."""
    (batch,) = micro_batches(arrays, 1)
    model: Any = model_of(spec, compute_dtype)
    inputs = {"input_ids": batch.tokens_BL, "attention_mask": batch.valid_BL.long()}
    hidden = model.model(**inputs).last_hidden_state
    values = (hidden[:, :-1] @ model.score.weight[0]).float() * batch.valid_BL[:, 1:]
    padded = torch.nn.functional.pad(values, (1, 0))
    return padded, unpack([batch], [padded.detach()], len(arrays["tokens"]))


def outputs_of(
    spec: ModelSpec, arrays: Arrays, compute_dtype: str = "float32"
) -> tuple[torch.Tensor, Array]:
    """Values of a critic, logprobs of another model."""
    of_tokens = values_of if spec.head == "value" else logprobs_of
    return of_tokens(spec, arrays, compute_dtype)


def distributions_of(
    spec: ModelSpec, arrays: Arrays, compute_dtype: str = "float32"
) -> tuple[MicroBatch, torch.Tensor]:
    """A whole batch as one padded micro-batch, and the logprobs of all tokens of the vocabulary in
    each place `[B, L - 1, V]`, with their graph."""
    (batch,) = micro_batches(arrays, 1)
    model = model_of(spec, compute_dtype)
    logits = model(input_ids=batch.tokens_BL, attention_mask=batch.valid_BL.long()).logits
    return batch, logits[:, :-1].float().log_softmax(-1)


def entropy_of(all_BPV: torch.Tensor) -> torch.Tensor:
    """Entropy of each distribution, with a column 0 of zeros: `[B, L]`."""
    return torch.nn.functional.pad(-(all_BPV.exp() * all_BPV).sum(-1), (1, 0))


def gradients_of(
    spec: ModelSpec,
    parameters: Tensors,
    arrays: tuple[Arrays, ...],
    loss: LossSpec,
    compute_dtype: str = "float32",
) -> tuple[list[Array], list[float], Tensors]:
    """Logprobs or values and loss of every batch, and the gradients of the sum of their losses."""
    own = set_parameters(spec, parameters, compute_dtype)
    for parameter in own.values():
        parameter.grad = None
    packed, losses = [], []
    for each in arrays:
        outputs, values = outputs_of(spec, each, compute_dtype)
        (batch,) = micro_batches(each, 1)
        entropy_BL = None
        if spec.head == "causal":
            entropy_BL = entropy_of(distributions_of(spec, each, compute_dtype)[1])
        denominator = loss_denominator(loss, each)
        found = compute_loss(loss, outputs, batch.per_token_BL, denominator, entropy_BL=entropy_BL)
        found.loss.backward()  # type: ignore[no-untyped-call]
        packed.append(values)
        losses.append(float(found.loss.detach()))
    gradients = {}
    for name, parameter in own.items():
        assert parameter.grad is not None
        gradients[name] = parameter.grad.float()
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
