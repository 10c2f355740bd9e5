"""The SDK's requests as values, without I/O: blocking and `async` clients share them."""

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import msgspec

from plexrl.client.calls.transport import Call, deployment_path
from plexrl.client.data import results
from plexrl.client.data.argument_checks import (
    check_batch,
    check_model,
    checked_layout,
    plain_value,
    source_deployment,
)
from plexrl.limits import check_numbers
from plexrl.wire.operations import (
    AdamParams,
    CheckpointParams,
    ForwardBackwardParams,
    ForwardParams,
    GenerateParams,
    LossSpec,
    OperationKind,
    OperationParams,
    SamplingParams,
    SyncWeightsParams,
    loss_inputs,
)
from plexrl.wire.parameter_checks import (
    check_identifier,
    check_loss,
    check_name,
    check_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plexrl.client.data.batch import Batch
    from plexrl.model.spec import ModelSpec
    from plexrl.wire.tensors import Arrays

LOG = logging.getLogger(__name__)
JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Submission:
    """A request for an operation, and the decoder of its result."""

    call: Call
    decoder: results.Decoder
    deployment: str
    kind: OperationKind

    @property
    def has_batch(self) -> bool:
        """Whether the request carries tensors."""
        return self.call.content_type != JSON


def submission(
    deployment: str,
    kind: OperationKind,
    params: OperationParams | None,
    decoder: results.Decoder,
    arrays: "Arrays | None" = None,
) -> Submission:
    """An operation on `<job>/<name>`.

    Raises:
        InvalidRequestError: the parameters are invalid.
    """
    check_parameters(params)
    fields = {} if params is None else msgspec.structs.asdict(params)
    plain = msgspec.to_builtins(fields, enc_hook=plain_value)
    if arrays is None:
        content, content_type = msgspec.json.encode(plain), JSON
    else:
        from plexrl.wire.tensors import MEDIA_TYPE, encode_body

        content, content_type = encode_body(plain, arrays), MEDIA_TYPE
    return Submission(
        Call(
            method="POST",
            path=f"{deployment_path(deployment)}/operations/{kind.value}",
            query={"operation": f"{deployment.rpartition('/')[0]}:{uuid.uuid4().hex}"},
            content=content,
            content_type=content_type,
        ),
        decoder,
        deployment,
        kind,
    )


def forward(deployment: str, batch: "Batch", params: ForwardParams) -> Submission:
    """Logprobs of every token."""
    check_batch(batch)
    return submission(
        deployment,
        OperationKind.FORWARD,
        params,
        results.forward_decoder(batch.lengths),
        batch.arrays(()),
    )


def score(deployment: str, batch: "Batch", micro_batch_tokens: int) -> Submission:
    """A reward model's score of every row."""
    check_batch(batch)
    return submission(
        deployment,
        OperationKind.FORWARD,
        ForwardParams(micro_batch_tokens=micro_batch_tokens),
        results.decode_scores,
        batch.arrays(()),
    )


def forward_backward(
    deployment: str, batch: "Batch", loss: LossSpec, micro_batch_tokens: int
) -> Submission:
    """Gradients of a loss, added to the accumulated ones."""
    check_batch(batch)
    check_loss(loss)
    names = loss_inputs(loss)
    arrays = batch.arrays(names)
    if "mask" in names and len(batch):
        from plexrl.wire.tensors import check_mask

        check_mask(arrays["mask"], arrays["lengths"])
    return submission(
        deployment,
        OperationKind.FORWARD_BACKWARD,
        ForwardBackwardParams(
            loss=loss, micro_batch_tokens=micro_batch_tokens, sampled_step=batch.sampled_step
        ),
        results.train_decoder(batch.lengths),
        arrays,
    )


def optim_step(deployment: str, params: AdamParams) -> Submission:
    """One optimizer step with the accumulated gradients."""
    return submission(deployment, OperationKind.OPTIM_STEP, params, results.decode_step)


def zero_grad(deployment: str) -> Submission:
    """Drop the accumulated gradients."""
    return submission(deployment, OperationKind.ZERO_GRAD, None, results.decode_plain)


def generate(
    deployment: str,
    prompts: "Sequence[Sequence[int]]",
    n: int,
    sampling: SamplingParams,
    *,
    stream: bool | Literal["rows"],
    settings: "Arrays | None" = None,
) -> Submission:
    """Samples of prompts. `settings`: values for each prompt, see `PROMPT_SAMPLING`."""
    from plexrl.client.data.batch import Batch

    # What is no `SamplingParams` is refused with the other parameters.
    batch = Batch(prompts)
    is_same = not settings and isinstance(sampling, SamplingParams)
    return submission(
        deployment,
        OperationKind.GENERATE,
        GenerateParams(samples_per_prompt=n, sampling=sampling, stream=stream),
        _naming_cut_samples(
            results.generate_decoder(n, batch.lengths), sampling.max_tokens if is_same else None
        ),
        {**batch.arrays(()), **(settings or {})},
    )


def streams_of(
    first_samples: "Sequence[int] | None", prompts: "Sequence[Sequence[int]]"
) -> "Arrays | None":
    """The `settings` of `generate` for the prompts' random streams.

    Raises:
        BatchShapeError: there is not one for each prompt, or one is no whole number from 0.
    """
    if first_samples is None:
        return None
    import numpy as np

    from plexrl.client.data.batch_rows import check_count, rows_of

    rows = rows_of("first_samples", first_samples)
    numbers = [
        number for number in rows if isinstance(number, int | np.integer) and 0 <= number < 2**63
    ]
    check_count("whole numbers in first_samples", len(numbers), "prompts", len(prompts))
    return {"first_sample": np.array(numbers, dtype=np.int64)}


def _naming_cut_samples(decoder: results.Decoder, max_tokens: int | None) -> results.Decoder:
    """`decoder`, with a warning of samples that ended before `max_tokens`, at the bound of the
    deployment. None: the bound of each sample is not known."""

    def decode(result: "Mapping[str, Any]", arrays: "Arrays") -> Any:
        found = decoder(result, arrays)
        samples = [each for group in found.samples for each in group]
        cut = [
            len(sample.tokens)
            for sample in samples
            if sample.finish_reason == "length"
            and max_tokens is not None
            and len(sample.tokens) < max_tokens
        ]
        if cut:
            LOG.warning(
                "%d of %d samples ended before max_tokens (%d), the shortest after %d: prompt and "
                "completion together reached max_sequence_tokens of the deployment",
                *(len(cut), len(samples), max_tokens, min(cut)),
            )
        return found

    return decode


def sync_weights(
    deployment: str,
    source: object,
    *,
    delta: bool | Literal["auto"],
    digest: bool,
    in_flight: bool = False,
    recompute_kv: bool = True,
    published: bool = False,
) -> Submission:
    """Set a rollout or reference deployment to the weights of `source`, a train deployment."""
    params = SyncWeightsParams(
        source=source_deployment(source),
        delta=delta,
        digest=digest,
        in_flight=in_flight,
        recompute_kv=recompute_kv,
        published=published,
    )
    return submission(deployment, OperationKind.SYNC_WEIGHTS, params, results.decode_plain)


def publish(deployment: str) -> Submission:
    """Publish a train deployment's weights."""
    return submission(deployment, OperationKind.PUBLISH, None, results.decode_plain)


def save_checkpoint(deployment: str, params: CheckpointParams) -> Submission:
    """Write a checkpoint."""
    return submission(deployment, OperationKind.SAVE_CHECKPOINT, params, results.decode_plain)


def load_checkpoint(deployment: str, name: str, job: str | None, *, optimizer: bool) -> Submission:
    """Restore a checkpoint."""
    params = CheckpointParams(name=name, job=job, optimizer=optimizer)
    return submission(deployment, OperationKind.LOAD_CHECKPOINT, params, results.decode_plain)


def checked_deadline(deadline_s: float) -> float:
    """Check the seconds in which operations must begin.

    Raises:
        InvalidRequestError: `deadline_s` is not a number above 0.
    """
    check_numbers("deadline", {"deadline_s": deadline_s})
    return float(deadline_s)


def pause(deployment: str, for_s: float) -> Call:
    """Pause generations. Raises `InvalidRequestError`."""
    check_numbers("pause", {"for_s": for_s})
    body = {"for_s": float(for_s)}
    return Call(method="POST", path=f"{deployment_path(deployment)}/pause", json=body)


def switch_tp(deployment: str, tp: int, kv: str) -> Call:
    """Continue generations in groups of `tp` ranks. Raises `InvalidRequestError`."""
    check_numbers("switch", {"tp": tp})
    body = {"tp": int(tp), "kv": kv}
    return Call(method="POST", path=f"{deployment_path(deployment)}/tp", json=body)


def barrier(deployment: str) -> Submission:
    """No effect; it finishes in queue order."""
    return submission(deployment, OperationKind.BARRIER, None, results.decode_plain)


def create_job(name: str, job_id: str | None, options: Mapping[str, object]) -> Call:
    """Submit a job.

    Raises:
        InvalidRequestError: the name, the id or a number is invalid.
    """
    check_numbers("job", options)
    if job_id is None:
        check_name("job", name)
        job_id = f"{name}-{uuid.uuid4().hex[:8]}"
    check_identifier("job", job_id)
    body = {"job": job_id, "name": name, **options}
    return Call(
        method="POST", path="/v1/jobs", json=msgspec.to_builtins(body, enc_hook=plain_value)
    )


def create_deployment(
    job: str, name: str, kind: str, model: "ModelSpec", options: Mapping[str, object]
) -> Call:
    """Create a deployment.

    Raises:
        InvalidRequestError: the name is invalid, or `model` is not a model, or an option has a
            wrong type, or a number is out of bounds.
    """
    check_numbers("deployment", {k: v for k, v in options.items() if k != "tp_sizes"})
    check_name("deployment", name)
    check_model(model)
    body = {"name": name, "kind": kind, "model": model, **options, **checked_layout(options)}
    plain = msgspec.to_builtins(body, enc_hook=plain_value)
    return Call(method="POST", path=f"/v1/jobs/{quote(job)}/deployments", json=plain)
