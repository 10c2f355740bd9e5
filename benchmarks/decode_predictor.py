"""Measures how well decode steps of the built-in engine are predicted (PAT §5.5).

    python -m benchmarks.decode_predictor [--quick] [--json]

An engine of two ranks on this machine, profiled by `rollout.profile_decoding`, then drains batches:
rows of unequal lengths begin together and end one after the other. Each mean of 16 measured steps
is compared with the prediction for its rows and its KV cache. Both sizes of the groups take their
turns in each of the repetitions. `error_tpN_percent`: median of the relative errors; `error_total`:
of the predicted time of all compared steps of a batch. PAT Fig. 14 has 4.04 and 3.07 % on GPUs.

`gain_switch`: time of a batch in the smallest groups, divided by its time if the controller that a
rollout uses decides between two tokens; of the same batches in turn. The ranks share this machine's
cores, so a large group seldom is the faster one here, and a gain of 1 means that nothing switched.
"""

import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import plexrl
from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.client.calls.transport import deployment_path
from plexrl.client.data.decode_profile import DecodeProfile
from plexrl.cluster.embedded.start import start_embedded
from plexrl.rollout.policies.adaptive_tp.controller import SwitchController
from plexrl.rollout.policies.adaptive_tp.predictor import LatencyPredictor
from plexrl.rollout.policies.adaptive_tp.projection import DecodingRow, project

SIZES = (1, 2)
MODEL = plexrl.tiny_qwen2(
    "".join(map(chr, range(0x4E00, 0x4E00 + 300))), hidden=sized(256, quick=64), layers=4
)
PROFILE_MINUTES = sized(4.0, quick=0.05)
REPETITIONS = sized(3, quick=1)
ROWS = sized(32, quick=8)
PROMPT = 32
LONGEST = sized(400, quick=48)
POLL_S = 0.05


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = start_embedded(Path(folder), virtual_gpus=SIZES[-1])
        try:
            with (
                plexrl.connect(cluster.url, cluster.api_key) as connected,
                connected.create_job("decode-predictor") as job,
            ):
                measure(job, Path(folder))
        finally:
            cluster.close()


def measure(job: plexrl.Job, folder: Path) -> None:
    """Profile the engine, drain batches, and print the errors."""
    rollout = job.rollout_deployment(
        "engine",
        MODEL,
        parallelism=plexrl.Parallelism(tp=SIZES[-1]),
        tp_sizes=SIZES,
        max_concurrent_samples=ROWS,
    )
    profile = rollout.profile_decoding(folder / "profile.json", minutes=PROFILE_MINUTES)
    predictor = LatencyPredictor(profile)
    errors: dict[int, list[float]] = {size: [] for size in SIZES}
    totals: dict[int, list[float]] = {size: [] for size in SIZES}
    gains, switches = [], 0
    for repetition in range(REPETITIONS):
        lengths = drawn(Random(repetition))
        for size in SIZES:
            steps = drain(rollout, lengths, size)[1]
            predicted = [predictor.step_s(size, rows, tokens) for rows, tokens, _ in steps]
            found = [seconds for _, _, seconds in steps]
            errors[size] += [abs(p / s - 1) for p, s in zip(predicted, found, strict=True)]
            totals[size].append(abs(sum(predicted) / sum(found) - 1))
        fixed_s = drain(rollout, lengths, SIZES[0])[0]
        adaptive_s, _, count = drain(rollout, lengths, SIZES[0], profile)
        gains.append(fixed_s / adaptive_s)
        switches += count
    figures = {f"error_tp{size}_percent": 100 * median(errors[size]) for size in SIZES}
    figures |= {f"error_total_tp{size}_percent": 100 * median(totals[size]) for size in SIZES}
    figures |= {"gain_switch": median(gains), "switches": switches}
    rows = [
        (
            str(size),
            str(sum(each.tp == size for each in profile.points)),
            str(len(errors[size])),
            f"{100 * median(errors[size]):.1f} %",
            f"{100 * median(totals[size]):.1f} %",
        )
        for size in SIZES
    ]
    report(
        f"Predicted decode steps of drained batches of {ROWS} rows; gain of switches "
        f"{median(gains):.2f} ({switches} switches)",
        ("tp", "profiled loads", "compared means", "median error", "error of the total"),
        rows,
        figures,
    )


def drawn(rng: Random) -> list[int]:
    """Lengths with a long tail."""
    return [
        max(24, min(LONGEST, int(rng.lognormvariate(0, 0.9) * LONGEST / 5))) for _ in range(ROWS)
    ]


def drain(
    rollout: plexrl.RolloutDeployment,
    lengths: list[int],
    tp: int,
    profile: DecodeProfile | None = None,
) -> tuple[float, list[tuple[int, float, float]], int]:
    """Seconds of a batch, the rows, KV tokens and seconds of its measured steps, and its switches.
    It begins in groups of `tp` ranks; with a profile the controller decides on the way."""
    rng = Random(len(lengths))
    prompts = [[rng.randrange(3, 300) for _ in range(PROMPT)] for _ in lengths]
    rollout.pause()
    futures = [
        rollout.generate(
            [prompt],
            sampling=plexrl.SamplingParams(max_tokens=length, ignore_eos=True, seed=0),
        )
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    while len(load(rollout)["rows"]) < len(lengths):
        time.sleep(POLL_S)
    rollout.switch_tp(tp, kv="recompute")
    before = load(rollout)
    last = max((step[0] for step in before["steps"]), default=0)
    rollout.resume()
    began = time.perf_counter()
    found: dict[int, tuple[int, float, float]] = {}
    controller = None if profile is None else SwitchController(LatencyPredictor(profile))
    while True:
        state = load(rollout)
        for number, rows, tokens, seconds, size, other_s in state["steps"]:
            if number > last and size == tp:
                found[number] = rows, tokens, seconds + other_s
        if not state["rows"]:
            break
        if controller is not None:
            decide(rollout, controller, state)
        time.sleep(POLL_S)
    for future in futures:
        future.result()
    took_s = time.perf_counter() - began
    return took_s, list(found.values()), state["tp_switches"] - before["tp_switches"]


def decide(
    rollout: plexrl.RolloutDeployment,
    controller: SwitchController,
    state: dict[str, Any],
) -> None:
    """Switch if it pays now; past lengths are those of another batch."""
    past = drawn(Random(-1))
    groups: list[list[DecodingRow]] = [[] for _ in range(SIZES[-1] // state["tp"])]
    for (_, _, tokens, _), group in zip(state["rows"], state["groups"], strict=True):
        groups[group].append(DecodingRow(tokens, max(0, tokens - PROMPT), LONGEST))
    switch = controller.decide(state["tp"], project(groups, past))
    if switch is not None:
        rollout.switch_tp(switch.tp, kv=switch.kv)


def load(rollout: plexrl.RolloutDeployment) -> dict[str, Any]:
    """The load of the only engine."""
    path = f"{deployment_path(rollout.deployment)}/engines"
    while not (found := rollout._transport.ask("GET", path)["engines"]):
        time.sleep(POLL_S)  # it is in the middle of a long pass
    return dict(found[0])


if __name__ == "__main__":
    main()
