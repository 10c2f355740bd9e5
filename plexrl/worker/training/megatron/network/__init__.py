"""The model of one Megatron rank: a GPT on packed rows, with PlexRL's attention and experts."""
