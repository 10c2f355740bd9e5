"""The parts of a deployment's state; each module has one part and all that writes it. Pure."""
