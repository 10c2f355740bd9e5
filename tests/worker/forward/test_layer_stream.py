"""Every layer finds its own bytes in its slot, from its start to its end."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from plexrl.worker.forward.layer_stream import LayerStream
from tests.examples import examples

NBYTES = 1 << 12
PASS, BROKEN, DRAIN = "pass", "broken", "drain"


class Layer(nn.Module):
    """Fails if its slot has other bytes than its own."""

    def __init__(self, number: int, slot: torch.Tensor, nbytes: int) -> None:
        super().__init__()
        self.number, self.slot, self.nbytes = number, slot, nbytes

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            assert torch.equal(
                self.slot[: self.nbytes], torch.full((self.nbytes,), self.number, dtype=torch.uint8)
            )
        if int(given) == self.number:
            raise ValueError("broken")
        return given


@settings(max_examples=examples(60), deadline=None)
@given(
    count=st.integers(2, 9),
    slots=st.integers(1, 8),
    steps=st.lists(st.sampled_from([PASS, PASS, BROKEN, DRAIN]), max_size=8),
    broken_at=st.integers(0, 8),
)
def test_every_layer_runs_with_its_own_bytes(
    count: int, slots: int, steps: list[str], broken_at: int
) -> None:
    slots = min(slots, count - 1)
    sizes = [NBYTES - index for index in range(count)]
    hosted = [torch.full((size,), n, dtype=torch.uint8) for n, size in enumerate(sizes)]
    memory = [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(slots)]
    layers = [Layer(n, memory[n % slots], size) for n, size in enumerate(sizes)]
    stream = LayerStream(layers, hosted, memory)
    for step in steps:
        if step == DRAIN:
            stream.drain()
            # The memory is another deployment's meanwhile.
            for slot in memory:
                slot.fill_(255)
            continue
        value = torch.tensor(broken_at if step == BROKEN else -1)
        try:
            for layer in layers:
                value = layer(value)
        except ValueError:
            assert step == BROKEN
    stream.drain()


def test_copies_of_following_layers_run_while_one_computes() -> None:
    hosted = [torch.full((64,), n, dtype=torch.uint8) for n in range(4)]
    memory = [torch.zeros(64, dtype=torch.uint8) for _ in range(2)]
    layers = [Layer(n, memory[n % 2], 64) for n in range(4)]
    stream = LayerStream(layers, hosted, memory)
    # Layer 1 is there before it is called: layer 0's call has begun its copy.
    layers[0](torch.tensor(-1))
    copy = stream._copies[1]
    assert copy is not None
    copy.result(60.0)
    assert memory[1].tolist() == [1] * 64
    stream.drain()
