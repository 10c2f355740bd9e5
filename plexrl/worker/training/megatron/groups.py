"""Megatron's process groups for a `Parallelism`; both number ranks in the same order."""

from megatron.core import parallel_state

from plexrl.errors import LayoutError
from plexrl.model.parallelism import Parallelism


def join_groups(layout: Parallelism) -> None:
    """Create the process groups, once per process; every rank takes part.

    Raises:
        LayoutError: the process has groups for another layout.
    """
    if parallel_state.model_parallel_is_initialized():
        made = _layout_made()
        if made != layout:
            raise LayoutError(
                f"this process runs Megatron with {made.describe()}, and cannot change to "
                f"{layout.describe()}: start new workers for another layout",
                field="parallelism",
            )
        return
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        # Experts are whole: see `plexrl.model.parallelism`.
        expert_tensor_parallel_size=1,
        order="tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )


def _layout_made() -> Parallelism:
    return Parallelism(
        dp=parallel_state.get_data_parallel_world_size(),
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        cp=parallel_state.get_context_parallel_world_size(),
        ep=parallel_state.get_expert_model_parallel_world_size(),
    )
