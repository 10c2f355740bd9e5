"""How large the state is that a job of a trace moves on a switch. Pure.

A trace of sizes alone has its jobs' states from the published profile of their class (7B: 106 GB),
whatever their GPUs; but a job that ran on its GPUs had its state on them. So the state is the
row's as far as it fits: at most `DEVICE_PART` of the memory of all its GPUs. What is beyond that is
taken to be no part of the job (it ran a smaller model), in host memory as on the GPUs. A row that
says nothing has the state of the published class for its size.
"""

from plexrl.sim.workload.scenario import NodeType
from plexrl.traces.generate.published import STATE_BYTES_PER_PARAMETER, class_of_size
from plexrl.traces.schema import TraceJob

DEVICE_PART = 0.8
"""Of a GPU's memory; the rest is for activations and buffers."""


def device_state_bytes(job: TraceJob, node_type: NodeType) -> int:
    """Bytes of state on all GPUs of the job together."""
    wanted = job.state_bytes
    if wanted is None:
        wanted = round(STATE_BYTES_PER_PARAMETER * class_of_size(job.gpus).parameters)
    fitting = int(DEVICE_PART * node_type.gpu_memory_bytes) * job.gpus
    return min(wanted, fitting)
