"""The paced engine: draws tokens by a hash, in the time of a modelled engine, without torch."""
