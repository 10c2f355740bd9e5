"""Megatron's process groups for a layout of ours; the two number ranks alike."""

from megatron.core import parallel_state

from plexrl.errors import LayoutError
from plexrl.model.parallelism import Parallelism


def join_groups(layout: Parallelism) -> None:
    """Make the groups of this process, once; every rank takes part.

    Raises:
        LayoutError: the process has groups of another layout.
    """
    if parallel_state.model_parallel_is_initialized():
        made = _layout_made()
        if made != layout:
            raise LayoutError(
                f"this process runs Megatron with {made.describe()} and is asked for "
                f"{layout.describe()}: a worker process has one layout for its life",
                field="parallelism",
            )
        return
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        # Experts are cut by tp like all else: `plexrl.model.parallelism`.
        expert_tensor_parallel_size=layout.tp,
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
