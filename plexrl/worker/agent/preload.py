"""What the fork server imports once, so that a worker starts in a fraction of a second."""

import gc

import torch
import torch.distributed.fsdp
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2

import plexrl.worker.process.worker
import plexrl.worker.rollout.engine
import plexrl.worker.training.fsdp.model

__all__ = ["plexrl", "torch", "transformers"]

# What is imported stays for good. Left to the collector it would be walked at every offload, and
# every walk would copy the pages that workers share with the fork server.
gc.collect()
gc.freeze()
