"""Results of a computation, brought from its device to the CPU."""

from collections.abc import Mapping, Sequence

import torch


def on_cpu(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results on the CPU. From a GPU all are brought with one copy, as float32."""
    if not any(result.is_cuda for result in results):
        return list(results)
    flat = torch.cat([result.detach().reshape(-1).float() for result in results]).cpu()
    found, first = [], 0
    for result in results:
        found.append(flat[first : first + result.numel()].view(result.shape))
        first += result.numel()
    return found


def named_on_cpu(results: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """As `on_cpu`, for results by name. Ids of tokens are exact as float32."""
    found = iter(on_cpu([value for result in results for value in result.values()]))
    return [{name: next(found) for name in result} for result in results]
