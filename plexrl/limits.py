"""The bounds of every numeric option of the SDK, the HTTP API and the command line.

`LIMITS` is the one table. The SDK checks an option by it before anything is sent, a command before
it does anything, and the router again, because it trusts no client. A bound is the last value whose
arithmetic works: float32 for what models compute with, 32 bits for counts of engines, 64 bits for
bytes. Most numbers of configuration files that are no option are bounded beside their settings.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from plexrl.bounds import Bounds

COUNT_MAX = 2**31 - 1
"""Largest count of tokens, samples and so on: engines count in 32 bits."""
RECORDS_MAX = 1_000_000_000
"""Largest number of jobs, batches and so on that the scheduler counts."""
BYTES_MAX = 2**62
SAMPLES_MAX = 65_536
RANKS_MAX = 65_536
TOP_LOGPROBS_MAX = 128
"""Most alternatives of a token: a result has 8 bytes for each."""
RESULT_BYTES_MAX = 8 << 30
"""Largest result of a `generate` or `forward` call. At its end a worker holds it three times: in
rows, in arrays and as a payload, half as large as a frame may carry."""
SECONDS_MAX = 1e12
"""Added to a clock of this century, a float still resolves a millisecond."""
WAIT_S_MAX = 1e6
"""Longest time that a thread or a socket may wait: the C library counts milliseconds in 31 bits."""
CONNECTIONS_MAX = 1 << 20
MEMORY_MAX = 1 << 50
SPEED_MAX = 1e6
"""Training speed of a node relative to others."""
SLEEP_S_MIN = 1e-3
"""Shortest time: clocks and timers are about as exact."""


def _count(least: int, most: int, hint: str = "") -> Bounds:
    return Bounds(least, most, is_whole=True, hint=hint)


def _maybe(bounds: Bounds) -> Bounds:
    return replace(bounds, may_be_absent=True)


_COUNT: Final = _count(1, COUNT_MAX)
_FROM_0: Final = _count(0, COUNT_MAX)
_RECORDS: Final = _count(0, RECORDS_MAX)
_RANKS: Final = _count(1, RANKS_MAX)
_TOP: Final = _count(0, TOP_LOGPROBS_MAX)
_CLASS: Final = _count(-100, 100)
_SEED: Final = _count(0, 2**63 - 1)
_ANY_SEED: Final = _count(-(2**63), 2**63 - 1)
_SECONDS: Final = Bounds(0, SECONDS_MAX, is_open=True)
_WAIT: Final = Bounds(SLEEP_S_MIN, WAIT_S_MAX)
_PART: Final = Bounds(0, 1, is_open=True)
_CLIP: Final = Bounds(0, 1e6)
_OVER_LAUNCH: Final = Bounds(1, 16)
_PORT: Final = _count(0, 65_535)
_SPEED: Final = Bounds(0, SPEED_MAX)
_PRICE: Final = Bounds(0, 1e6)
_YEARS_DAYS: Final = 36_500.0

LIMITS: Final[Mapping[str, Mapping[str, Bounds]]] = {
    # One float32 step moves a parameter by a few learning rates. From weights of some thousands the
    # product of an MLP's two halves, squared by the next norm, is still below 3e38. An `eps` below
    # 1e-20 divides gradients whose squares are 0 in float32.
    "optim_step": {
        "learning_rate": Bounds(0, 1e3),
        "momentum": _maybe(Bounds(0, 0.9999999)),
        "beta1": Bounds(0, 0.9999999),
        "beta2": Bounds(0, 0.9999999),
        "eps": Bounds(1e-20, 1e6),
        "weight_decay": Bounds(0, 1e3),
        "grad_clip_norm": Bounds(1e-12, 1e12, may_be_zero=True),
        "divide_by": Bounds(1e-9, 1e18),
    },
    # Beyond these a term overflows as soon as it meets a ratio of a few thousands.
    "loss": {
        "clip_low": _CLIP,
        "clip_high": _CLIP,
        "kl_coef": Bounds(0, 1e6),
        "entropy_coef": Bounds(0, 1e6),
        "beta": Bounds(0, 1e6),
        "weight_cap": _maybe(Bounds(1e-6, 1e6)),
        "token_range": Bounds(0, 1e6),
        "sequence_range": Bounds(0, 1e6),
        "value_clip": _maybe(Bounds(1e-6, 1e6)),
    },
    "advantages": {"gamma": Bounds(0, 1), "lam": Bounds(0, 1)},
    "preference": {"beta": Bounds(0, 1e6)},
    # Logits of 1e30 divided by 1e-6 still are float32 numbers.
    "sampling": {
        "max_tokens": _COUNT,
        "temperature": Bounds(1e-6, 1e6, may_be_zero=True, hint="; 0 is greedy"),
        "top_p": Bounds(1e-6, 1, hint="; 1 keeps the whole vocabulary"),
        "top_k": _FROM_0,
        "seed": _maybe(_SEED),
        "first_sample": _FROM_0,
        "drawn_tokens": _FROM_0,
        "top_logprobs": _TOP,
        "prompt_top_logprobs": _TOP,
        "stop_token_ids": _FROM_0,
        "stop_sequences": _FROM_0,
    },
    "generate": {"samples_per_prompt": _count(1, SAMPLES_MAX)},
    "forward": {"micro_batch_tokens": _COUNT, "top_logprobs": _TOP},
    "forward_backward": {"micro_batch_tokens": _COUNT, "sampled_step": _maybe(_FROM_0)},
    "save_checkpoint": {
        "shard_bytes_max": _count(1, 2**63 - 1),
        "keep_last": _maybe(_COUNT),
        "keep_every": _maybe(_COUNT),
        "keep_bytes": _maybe(_count(1, BYTES_MAX - 1)),
        "step": _maybe(_ANY_SEED),
    },
    "job": {
        "controller_timeout_s": Bounds(SLEEP_S_MIN, SECONDS_MAX),
        "reattach_timeout_s": Bounds(0, SECONDS_MAX),
        "priority": _CLASS,
        "gang": _RECORDS,
        "expected_s": _SECONDS,
        "slo": _maybe(_PART),
    },
    "fork": {"step": _RECORDS},
    "quote": {
        "steps": _maybe(_COUNT),
        "expected_s": _maybe(_SECONDS),
        "price": _maybe(_PRICE),
        "gpus": _RANKS,
        "rollout_gpus": _count(0, RANKS_MAX),
        "state_bytes": _count(1, BYTES_MAX - 1),
    },
    "deployment": {
        "workers": _maybe(_RANKS),
        "max_sequence_tokens": _maybe(_count(2, 1 << 22)),
        "max_concurrent_samples": _count(1, 1 << 16),
        "kv_cache_bytes": _maybe(_count(1, 2**63 - 1)),
        "layers_on_device": _maybe(_COUNT),
        "tp_sizes": _RANKS,
        "checkpoint_every": _maybe(_COUNT),
        "checkpoint_keep": _maybe(_COUNT),
        "checkpoint_bytes": _maybe(_count(1, BYTES_MAX - 1)),
    },
    "layout": {"dp": _RANKS, "tp": _RANKS, "pp": _RANKS, "cp": _RANKS, "ep": _RANKS},
    # Adapters are scaled by alpha / rank: less than 1e-6 / 1024 is lost beside the weights.
    "lora": {
        "rank": _count(1, 1024),
        "alpha": Bounds(1e-3, 1e6),
        "seed": _count(0, 2**64 - 1),
    },
    "model": {
        "seed": _count(-(2**63), 2**64 - 1),
        "hidden": _count(8, 1 << 20),
        "layers": _count(1, 1 << 16),
    },
    "roll_out": {
        "turns_max": _count(1, 10_000),
        "max_sequence_tokens": _maybe(_COUNT),
        "steps_at_once": _count(1, 10_000),
        "step_timeout_s": _WAIT,
        "operations_at_once": _count(1, 256),
    },
    "trace": {"period_s": replace(_SECONDS, least=1e-3), "jitter_s": _SECONDS},
    "segment": {"offset_s": _SECONDS, "duration_s": _SECONDS, "slack_s": _SECONDS},
    "tenant": {
        "weight": Bounds(1e-6, 1e6),
        "jobs_max": _maybe(_RECORDS),
        "gpus_max": _maybe(_RECORDS),
        "gpu_seconds_max": _maybe(_SECONDS),
        "live_jobs_max": _maybe(_RECORDS),
        "checkpoints_max": _maybe(_RECORDS),
        "checkpoint_bytes_max": _maybe(_count(0, BYTES_MAX - 1)),
        "priority_max": _CLASS,
        "slo": _maybe(_PART),
    },
    "rollout": {
        "instances": _count(1, 4096),
        "prompts": _count(1, SAMPLES_MAX),
        "samples": _count(1, SAMPLES_MAX),
        "first_batch": _RECORDS,
        "failed_prompts_max": _RECORDS,
        "staleness": _count(0, 4096),
        "over_launch": _OVER_LAUNCH,
        "over_launch_prompts": _OVER_LAUNCH,
        "over_launch_responses": _OVER_LAUNCH,
        "instances_min": _count(0, 4096),
        "instances_max": _count(0, 4096),
        "steps": _RECORDS,
        "tokens_min": _RECORDS,
        "prompts_min": _count(1, RECORDS_MAX),
        "reward_timeout_s": _maybe(_WAIT),
    },
    "elastic": {"min": _count(1, 4096), "max": _count(1, 4096)},
    "profile": {
        "minutes": Bounds(0, 1e5),
        "switch_s": Bounds(0, SECONDS_MAX),
        "kv_bytes_per_s": _maybe(Bounds(1, 1e18)),
    },
    # Bodies of what the SDK asks beside its options.
    "exchange": {
        "first": _RECORDS,
        "after": _RECORDS,
        "token": _RECORDS,
        "trajectory": _RECORDS,
        "event": _RECORDS,
        "reward": _maybe(Bounds(-1e30, 1e30)),
        "trainer_step": _RECORDS,
        "version": _RECORDS,
    },
    "pause": {"for_s": Bounds(SLEEP_S_MIN, 3600)},
    "switch": {"tp": _RANKS},
    "stop_rows": {"rows": _count(0, SAMPLES_MAX - 1)},
    "metrics": {"step": _ANY_SEED},
    "samples": {"step": _ANY_SEED, "total": _FROM_0, "failed": _FROM_0, "length": _FROM_0},
    "connection": {"timeout_s": Bounds(SLEEP_S_MIN, WAIT_S_MAX)},
    "deadline": {"deadline_s": Bounds(1e-6, SECONDS_MAX)},
    "result": {"timeout_s": _maybe(Bounds(0, WAIT_S_MAX))},
    "queue": {"limit": _count(1, 100)},
    "key": {"valid_s": _maybe(Bounds(1, _YEARS_DAYS * 86_400))},
    "page": {
        "after": _count(0, 2**62),
        "limit": _count(1, RECORDS_MAX),
        "lines": _count(1, 1_000_000),
        "seconds": Bounds(1, SECONDS_MAX),
        "until_s": Bounds(0, SECONDS_MAX),
        "wait_s": Bounds(0, WAIT_S_MAX),
        "deadline_s": _maybe(Bounds(1e-6, SECONDS_MAX)),
        "start": _count(0, BYTES_MAX),
        "stop": _maybe(_count(0, BYTES_MAX)),
    },
    "progress": {"steps": _maybe(_count(0, 2**62)), "step": _ANY_SEED},
    "grading": {
        "retries": _count(0, 1000),
        "at_once": _maybe(_RANKS),
        "timeout_s": _maybe(_WAIT),
        "samples_per_prompt": _count(0, SAMPLES_MAX),
        "rows_max": _count(1, SAMPLES_MAX),
        "batches_max": _RANKS,
        "score": Bounds(-1e30, 1e30),
    },
    "answers": {
        "lowest": Bounds(-1e300, 1e300),
        "highest": Bounds(-1e300, 1e300),
        "relative": Bounds(0, 1),
        "absolute": Bounds(0, 1e300),
    },
    "sandbox": {
        "at_once": _maybe(_RANKS),
        "timeout_s": _WAIT,
        "memory_bytes": _count(1, MEMORY_MAX),
        "cpu_s": _count(1, RECORDS_MAX),
        "processes": _count(1, 1 << 22),
        "open_files": _count(1, 1 << 20),
        "tmp_bytes": _count(1, MEMORY_MAX),
        "output_bytes": _count(1, MEMORY_MAX),
        "factor": Bounds(1, 1e6),
        "min_s": _WAIT,
        "max_s": _WAIT,
    },
    # A setting of the routers. An hour after the last wrong key, a network may send one again.
    "router": {
        "refused_keys_burst": _count(1, 1_000_000),
        "runs_max": _count(0, 10_000),
        "refused_keys_per_s": Bounds(1 / 3600, 1e6),
    },
    "plexrl dashboard": {"port": _PORT},
    "plexrl history events": {
        "since_hours": Bounds(0, SECONDS_MAX),
        "until_hours": Bounds(0, SECONDS_MAX),
    },
    "plexrl up": {
        "node_speed": _SPEED,
        "nodes": _maybe(_count(0, 65_536)),
        "routers": _RANKS,
        "gpus": _maybe(_count(0, RANKS_MAX)),
        "virtual_gpus": _maybe(_RANKS),
        "gpu_memory_bytes": _maybe(_count(1, MEMORY_MAX)),
        "host_memory_bytes": _maybe(_count(1, MEMORY_MAX)),
        "nvme_bytes": _count(0, MEMORY_MAX),
        "port": _PORT,
        "join_port": _PORT,
        "scheduler_port": _PORT,
        "journal_bytes_max": _maybe(_count(1, BYTES_MAX)),
        "archive_days": _maybe(Bounds(0, 36_500)),
        "archive_bytes_max": _maybe(_count(1 << 24, BYTES_MAX)),
        "lease_s": _maybe(Bounds(0.1, 86_400)),
        "node_replace_s": Bounds(0, 1e9),
        "rebuild_operations": _count(0, 1 << 40),
        "pending_operations_max": _maybe(_count(1, 1 << 40)),
        "tenant_operations_max": _maybe(_count(1, 1 << 40)),
        "deployment_payload_bytes_max": _maybe(_count(1, BYTES_MAX)),
        "tenant_payload_bytes_max": _maybe(_count(1, BYTES_MAX)),
        "tenant_live_jobs_max": _count(1, RECORDS_MAX),
        "tenant_checkpoints_max": _maybe(_count(1, RECORDS_MAX)),
        "tenant_checkpoint_bytes_max": _maybe(_count(1, BYTES_MAX)),
        "metrics_row_bytes_max": _maybe(_count(1, 1 << 40)),
        "metrics_job_bytes_max": _maybe(_count(1, BYTES_MAX)),
        "samples_job_bytes_max": _maybe(_count(1, BYTES_MAX)),
        "connections_max": _maybe(_count(1, CONNECTIONS_MAX)),
        "address_connections_max": _maybe(_count(1, CONNECTIONS_MAX)),
        "header_timeout_s": _maybe(Bounds(0.001, 86_400)),
        "body_timeout_s": _maybe(Bounds(0.001, 86_400)),
        "json_bytes_max": _maybe(_count(1, 1 << 40)),
    },
    "plexrl node join": {
        "node_speed": _SPEED,
        "gpus": _maybe(_count(0, RANKS_MAX)),
        "virtual_gpus": _maybe(_RANKS),
        "gpu_memory_bytes": _maybe(_count(1, MEMORY_MAX)),
        "host_memory_bytes": _maybe(_count(1, MEMORY_MAX)),
        "nvme_bytes": _count(1, MEMORY_MAX),
    },
    "plexrl node token": {"uses": _count(1, 1_000_000)},
    "plexrl tenants set": {"weight": _maybe(Bounds(1e-6, 1e6)), "priority_max": _maybe(_CLASS)},
    "plexrl keys create": {"days": _maybe(Bounds(1 / 1440, _YEARS_DAYS))},
    "plexrl audit": {"hours": _maybe(Bounds(0, 1e6)), "limit": _count(1, 10_000)},
    "plexrl metrics": {"last": _COUNT},
    "plexrl samples": {"step": _maybe(_ANY_SEED), "last": _COUNT},
    "plexrl checkpoints keep": {"count": _COUNT},
    "plexrl logs": {"lines": _count(1, 1_000_000)},
    "plexrl top": {"interval": Bounds(1, 3600), "rows": _count(1, 50)},
    "plexrl run": {
        "memory_gib": Bounds(1 / 16, 1024),
        "hours": Bounds(1e-3, 1e5),
        "restarts": _count(0, 1000),
    },
    "plexrl runs log": {"lines": _count(1, 10_000)},
    "plexrl operations": {"last": _COUNT},
    "plexrl demo": {"steps": _maybe(_count(1, 1_000_000)), "seed": _SEED, "workers": _RANKS},
    "plexrl statemanager": {"metrics_port": _maybe(_PORT)},
    "plexrl simulate": {
        "nodes": _count(1, 10_000),
        "max_nodes": _count(1, 10_000),
        "gpus_per_node": _maybe(_count(1, 1024)),
        "price": _maybe(_PRICE),
        "price_reserved": _maybe(_PRICE),
        "price_on_demand": _maybe(_PRICE),
        "price_rollout": _maybe(_PRICE),
        "reserved_nodes": _maybe(_count(0, 10_000)),
        "horizon_days": _maybe(Bounds(1e-4, _YEARS_DAYS)),
        "switch_s": _maybe(Bounds(0, 86_400)),
        "starvation_s": _maybe(Bounds(0, 1e9)),
        "start_day": Bounds(0, 11_573, hint="; no trace has later times"),
        "days": _maybe(Bounds(1e-3, _YEARS_DAYS)),
        "compress": Bounds(1e-3, 1e5),
        "cap_days": _maybe(Bounds(1e-4, _YEARS_DAYS)),
        "min_gpus": _count(1, 1_000_000),
        "max_gpus": _maybe(_count(1, 1_000_000)),
        "min_duration": Bounds(0, 1e9),
        "jobs_per_day": Bounds(1e-3, 1e6),
        "jitter": _maybe(Bounds(0, 3, hint=", as 0.15 for 15 %")),
        "staleness": _maybe(_count(0, 64)),
        "responses": _count(0, 1_000_000),
        "job_slo": _maybe(
            Bounds(0, 0.99, hint=", as 0.05 for 5 %; --slo has objectives of the cluster")
        ),
        "node_mtbf_hours": Bounds(0, 24 * _YEARS_DAYS),
        "repair_minutes": Bounds(0, 1440 * _YEARS_DAYS),
        "worker_mtbf_hours": Bounds(0, 24 * _YEARS_DAYS),
        "state_survives": Bounds(0, 1),
        "seed": _ANY_SEED,
        "workers": _maybe(_count(1, 1024)),
    },
    "plexrl simulate-rollout": {
        "scale": _maybe(Bounds(1e-6, 1e6)),
        "correlation": Bounds(0, 1),
        "group_size": _count(1, SAMPLES_MAX),
        "prompt_tokens": _count(1, 1 << 22),
        "gpus": _count(2, 1_000_000),
        "rollout_gpus": _maybe(_count(1, 1_000_000)),
        "batch": _count(1, SAMPLES_MAX),
        "tensor_parallel": _count(1, 1024),
        "over_launch": _OVER_LAUNCH,
        "recall": Bounds(0, 1),
        "steps": _count(1, 1_000_000),
        "warmup_steps": _count(0, 1_000_000),
        "cycle_s": Bounds(1e-3, 1e6),
        "seed": _ANY_SEED,
        "workers": _maybe(_count(1, 1024)),
    },
    "plexrl plan-rollout": {
        "gpus": _maybe(_count(2, 1_000_000)),
        "seeds": _count(1, 10_000),
        "workers": _maybe(_count(1, 1024)),
    },
    "plexrl allocate-rollout": {
        "scale": _maybe(Bounds(1e-6, 1e6)),
        "correlation": Bounds(0, 1),
        "group_size": _count(1, SAMPLES_MAX),
        "prompt_tokens": _count(1, 1 << 22),
        "batch": _count(1, SAMPLES_MAX),
        "tensor_parallel": _count(1, 1024),
        "trainer_gpus": _count(1, 1_000_000),
        "step_s": _maybe(Bounds(1e-6, 1e9)),
    },
    "plexrl fidelity": {"warm_up": _RECORDS, "seeds": _count(1, 10_000)},
    "plexrl rewind": {"step": _RECORDS},
    "plexrl fork": {"step": _RECORDS, "count": _count(1, 256)},
    "plexrl quote": {"steps": _maybe(_COUNT), "priority": _CLASS, "price": _maybe(_PRICE)},
    "plexrl forecast": {
        "groups": _RANKS,
        "cycles": _count(1, 1_000_000),
        "warm_up": _RECORDS,
        "seeds": _count(1, 10_000),
    },
    "plexrl traces convert": {
        "compress": Bounds(1e-6, 1e9),
        "cap_days": _maybe(Bounds(1e-6, 11_574, hint="; no trace has later times")),
        "min_gpus": _count(0, 1_000_000),
        "min_duration": Bounds(0, 1e9),
        "start_day": Bounds(0, 11_573, hint="; no trace has later times"),
        "gpus": _count(1, 1_000_000),
        "rollout_gpus": _count(0, 1_000_000),
        "requests": _count(1, 1_000_000_000),
        "seed": _SEED,
    },
    "plexrl traces describe": {"gpus": _maybe(_count(1, 1_000_000))},
    "plexrl traces generate": {
        "jobs": _maybe(_count(1, 1_000_000_000)),
        "days": _maybe(Bounds(1e-6, 11_574, hint="; no trace has later times")),
        "jobs_per_day": Bounds(1e-3, 1e6),
        "cap_days": Bounds(1e-3, 11_574, hint="; no trace has later times"),
        "lengths": _maybe(_count(1, 1_000_000_000)),
        "samples": _count(1, SAMPLES_MAX),
        "correlation": _maybe(Bounds(0, 1)),
        "seed": _ANY_SEED,
    },
}
"""Bounds of each numeric option, by what takes it and its name. A group that begins with `plexrl`
is a command; the others are arguments of the SDK and fields of the HTTP API."""


def check_numbers(group: str, values: Mapping[str, object]) -> None:
    """Check those of `values` that are in this group of `LIMITS`.

    Raises:
        InvalidRequestError: `details["parameter"]` names the first that is out of bounds.
    """
    for name, bounds in LIMITS[group].items():
        if name in values:
            bounds.check(name, values[name])
