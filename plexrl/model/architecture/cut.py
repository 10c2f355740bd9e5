"""How Megatron cuts a model over the ranks of a layout. Pure."""

from plexrl.model.architecture.dimensions import Dimensions
from plexrl.model.parallelism import Parallelism


def splits_tokens(sizes: Dimensions, layout: Parallelism) -> bool:
    """Whether Megatron's tensor ranks have different tokens between the cut matrices (sequence
    parallelism): experts need that, so that no token reaches one from several tensor ranks."""
    return layout.tp > 1 and sizes.experts > 0


def reduces_gradients(sizes: Dimensions, layout: Parallelism) -> bool:
    """Whether Megatron sums any gradient over ranks, in a buffer beside the shares: over replicas,
    over the stages that have a tied embedding, or of whole norms over tensor ranks."""
    return (
        layout.dp * layout.cp > 1
        or (layout.pp > 1 and sizes.is_tied)
        or (layout.tp > 1 and sizes.has_qk_norm)
        or splits_tokens(sizes, layout)
    )


def stage_layers(layers: int, stages: int) -> tuple[range, ...]:
    """The layers of each pipeline stage, in order. Stages differ by one layer at most; the last and
    the first ones, which have the output layer and the embedding, are the first to have fewer."""
    fewest, more = divmod(layers, stages)
    # Stages from the middle outwards; of two that are as far from it, the earlier one.
    outwards = sorted(range(stages), key=lambda stage: (abs(2 * stage - stages + 1), stage))
    larger = set(outwards[:more])
    found, first = [], 0
    for stage in range(stages):
        last = first + fewest + (stage in larger)
        found.append(range(first, last))
        first = last
    return tuple(found)
