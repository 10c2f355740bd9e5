"""Modules that the fork server imports once, so that a worker starts in a fraction of a second."""

import gc

from plexrl.process.garbage_collection import rare_collections

with rare_collections():
    import torch
    import torch.distributed.fsdp
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2

    import plexrl.worker.process.worker
    import plexrl.worker.rollout.engine
    import plexrl.worker.training.fsdp.model

    # Imported modules are never freed. The garbage collector would scan them at every offload, and
    # each scan would copy the pages that workers share with the fork server.
    gc.freeze()

__all__ = ["plexrl", "torch", "transformers"]
