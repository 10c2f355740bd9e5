"""Tokens per second of the built-in engine beside `transformers` and, where it is installed, vLLM.

    python -m benchmarks.gpu.generation [--quick] [--cpu] [--json]

All decode greedily from the same random model of 190 million parameters in bfloat16, with the
requests of `benchmarks/engine.py`: even ones are all of one size, ragged ones have answers with a
long tail. `transformers.generate` gets them as one left-padded batch and runs until the longest
answer is done; only tokens that were asked for count. Rounds alternate, and each figure is the best
round; the first round, in which CUDA graphs are captured, does not count. vLLM runs without graphs,
as in a PlexRL rollout.

The answers are checked: at each token of an answer, `transformers` must give the drawn token a
logit that is the largest, but for rounding. Kernels round differently, so answers themselves may
part at two equally likely tokens; `same_answers_share` is the part that did not. `--cpu` runs the
same code without a GPU in float32, which is quick together with `--quick`.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.engine import Request, by_engine, by_transformers, even, ragged
from benchmarks.gpu.part import Part, Place, note, open_place, random_model
from benchmarks.gpu.switch import GIB, running_daemon
from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.errors import DeviceUnavailableError
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.wire.operations import OperationKind
from plexrl.worker.models import build_model

REQUESTS = sized(128, quick=4)
ROUNDS = sized(3, quick=1)
HOST_BYTES = sized(4 * GIB, quick=GIB // 4)
KV_CACHE_BYTES = sized(4 * GIB, quick=None)
"""Enough for all requests at once."""
LOGIT_ERROR_MAX = {"float32": 1e-3, "bfloat16": 0.2}
"""A token drawn at random is below the likeliest by about 2."""
MODEL = random_model("".join(chr(code) for code in range(33, 126)), seed=1)
"""Its vocabulary has every token of the requests."""
CASES: dict[str, list[Request]] = {"even": even(REQUESTS), "ragged": ragged(REQUESTS)}

Answers = list[list[int]]
Run = Callable[[list[Request]], tuple[float, Answers]]
"""(seconds, answers) of requests."""


@contextmanager
def engine_run(backend: str, dtype: str, place: Place) -> Iterator[Run]:
    """A rollout backend in memory that a StateManager lends."""
    spec = DeploymentSpec(
        model=MODEL,
        kind="rollout",
        backend=backend,
        workers=1,
        dtype=dtype,
        max_sequence_tokens=256,
        max_concurrent_samples=REQUESTS,
        kv_cache_bytes=KV_CACHE_BYTES,
    )
    with running_daemon(HOST_BYTES, device=place.kind) as node:
        part = Part(spec, backend, node, place.device)
        part.move(OperationKind.LOAD)
        rollout: Any = part.backend

        def run(requests: list[Request]) -> tuple[float, Answers]:
            # Else the prompts of the round before would be there.
            rollout.engine.drop_cache()
            return by_engine(rollout.engine, requests)

        yield run
        part.close()


def compare(name: str, run: Run, model: Any, dtype: str) -> dict[str, float]:
    """Tokens per second of `run` and of `transformers`, and how far the answers agree.

    Raises:
        SystemExit: an answer is not that of the model.
    """
    figures, shares = {}, []
    for case, requests in CASES.items():
        tokens = sum(count for _, count in requests)
        ours = theirs = float("inf")
        for index in range(1 + ROUNDS):
            their_s, wanted = by_transformers(model, requests)
            our_s, found = run(requests)
            if index:
                ours, theirs = min(ours, our_s), min(theirs, their_s)
        note(f"{name}, {case}")
        error = largest_logit_error(model, requests, found)
        if error > LOGIT_ERROR_MAX[dtype]:
            sys.exit(f"{name}, {case}: a token's logit is {error:.3g} below the largest one")
        shares.append(sum(map(list.__eq__, found, wanted)) / len(requests))
        figures[f"{name}_{case}_tokens_s"] = tokens / ours
        figures[f"{name}_{case}_vs_transformers"] = theirs / ours
        figures[f"{name}_{case}_logit_error"] = error
    return {**figures, f"{name}_same_answers_share": min(shares)}


@torch.inference_mode()
def largest_logit_error(model: Any, requests: list[Request], answers: Answers) -> float:
    """How far the logit of an answer's token is below the largest, in one pass of the model over
    prompts and answers."""
    longest = max(len(prompt) + count for prompt, count in requests)
    tokens = torch.zeros((len(requests), longest), dtype=torch.int64)
    is_answer = torch.zeros((len(requests), longest), dtype=torch.bool)
    for row, ((prompt, count), answer) in enumerate(zip(requests, answers, strict=True)):
        assert len(answer) == count, "as many tokens as were asked for"
        tokens[row, : len(prompt) + count] = torch.tensor([*prompt, *answer])
        is_answer[row, len(prompt) : len(prompt) + count] = True
    logits = model(input_ids=tokens.to(model.device), use_cache=False).logits.float().cpu()[:, :-1]
    chosen = logits.gather(-1, tokens[:, 1:, None])[..., 0]
    return float((logits.amax(-1) - chosen)[is_answer[:, 1:]].max())


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model, few requests")
    parser.add_argument("--cpu", action="store_true", help="the same without a GPU")
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args()
    dtype = "float32" if wanted.cpu else "bfloat16"
    backends = ["torch"] + ["vllm"] * (importlib.util.find_spec("vllm") is not None)
    try:
        with open_place(cpu=wanted.cpu) as place:
            model: Any = build_model(MODEL)
            model = model.to(place.device.torch_device, getattr(torch, dtype))
            for backend in backends:
                with engine_run(backend, dtype, place) as run:
                    figures = compare(backend, run, model, dtype)
                rows = [[name, f"{value:.6g}"] for name, value in figures.items()]
                report(f"Backend {backend}, {dtype}", ["figure", "value"], rows, figures)
    except DeviceUnavailableError as error:
        sys.stdout.write(f"no GPU here, so nothing was measured: {error}\n")


if __name__ == "__main__":
    main()
