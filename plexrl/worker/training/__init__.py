"""Training backends: one rank of a model under one framework, behind one interface."""
