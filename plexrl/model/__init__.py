"""What a model and its layout are, without torch: specification, parallelism, LoRA, tokenizer."""
