"""Computes the size of the state that a job moves on a context switch. Pure.

A row without a state size gets the state of the published class for its GPUs (7B: 106 GB). Since a
recorded job did run on its GPUs, its state is limited to `DEVICE_PART` of the memory of all its
GPUs: a larger published state means that the job ran a smaller model.
"""

from plexrl.sim.workload.scenario import NodeType
from plexrl.traces.generate.published import STATE_BYTES_PER_PARAMETER, class_of_size
from plexrl.traces.schema import TraceJob

DEVICE_PART = 0.8
"""Part of a GPU's memory for state; the rest is for activations and buffers."""


def device_state_bytes(job: TraceJob, node_type: NodeType) -> int:
    """Total bytes of state on all GPUs of the job."""
    wanted = job.state_bytes
    if wanted is None:
        wanted = round(STATE_BYTES_PER_PARAMETER * class_of_size(job.gpus).parameters)
    fitting = int(DEVICE_PART * node_type.gpu_memory_bytes) * job.gpus
    return min(wanted, fitting)
