"""What the fork server imports once, so that a worker starts in a fraction of a second."""

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2

import plexrl.worker.engine
import plexrl.worker.fsdp
import plexrl.worker.process

__all__ = ["plexrl", "torch", "transformers"]
