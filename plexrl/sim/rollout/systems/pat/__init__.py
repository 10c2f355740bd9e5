"""PAT on the virtual clock: tensor-parallel groups that change while a batch drains."""
