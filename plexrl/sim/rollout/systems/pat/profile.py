"""The profile of a simulated engine (PAT §4.2): its own latencies at the points of a profiler."""

from plexrl.client.data.decode_profile import DecodeProfile, ProfilePoint, ProfileSubject
from plexrl.latency.models import Model
from plexrl.sim.rollout.setting import Setting

ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256)
LENGTHS = (8, 128, 512, 2048, 8192, 32_768)


def switched_sizes(setting: Setting, model: Model) -> tuple[int, ...]:
    """Sizes between which an engine switches that begins with the size of the setting, the
    smallest: each rank has the memory for it (`tp_sizes` of a deployment)."""
    longest = setting.workload.prompt_tokens + setting.workload.limit
    return tuple(
        tp for tp in model.sizes(longest) if tp >= setting.costs.gpus and not setting.gpus % tp
    )


def decode_profile(setting: Setting, model: Model) -> DecodeProfile:
    """Points of the setting's size and of larger ones."""
    sizes = switched_sizes(setting, model)
    points = []
    for tp in sizes:
        costs = model.costs(tp)
        for rows in ROWS:
            for tokens in LENGTHS:
                if rows > 1 and rows * tokens > costs.kv_tokens:
                    continue
                point = ProfilePoint(
                    tp=tp,
                    rows=rows,
                    prompt_tokens=tokens,
                    kv_tokens=float(rows * tokens),
                    step_s=costs.step_s(rows, rows * tokens),
                    prefill_s=rows * costs.prefill_s(tokens),
                )
                points.append(point)
    return DecodeProfile(
        subject=ProfileSubject(
            model=model.name,
            dtype="bfloat16",
            device=model.gpu.name,
            tp_sizes=sizes,
            kv_token_bytes=model.token_bytes,
        ),
        points=tuple(points),
        switch_s=model.gpu.switching.fixed_s,
        kv_bytes_per_s=model.gpu.switching.kv_bytes_per_s,
    )
