"""Random numbers by counter: the n-th number of a stream follows from its key and n alone. Pure.

So two runs that differ in policy draw the same for the same thing, in whatever order they come to
it, and a stream needs no memory. The generator is splitmix64 (Steele, Lea and Flood, OOPSLA 2014),
which may be entered at any place.
"""

from hashlib import blake2b
from math import cos, exp, log, pi, sin, sqrt

_WORD = (1 << 64) - 1
_HALF = (1 << 32) - 1
_GAMMA = 0x9E3779B97F4A7C15
_ANGLE = 2.0 * pi * 2.0**-32


def stream(seed: int, *names: str) -> int:
    """The key of the stream of that name; another name, or another seed, is another stream."""
    text = "\0".join((str(seed), *names))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def word(key: int, number: int) -> int:
    """The stream's `number`-th 64 bits."""
    bits = (key + number * _GAMMA) & _WORD
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _WORD
    return bits ^ (bits >> 31)


def uniform(key: int, number: int) -> float:
    """Between 0 and 1, never either."""
    return ((word(key, number) >> 11) + 0.5) * 2.0**-53


def normals(key: int, number: int) -> tuple[float, float]:
    """Two independent standard normal numbers, of at most 6.8 standard deviations (Box-Muller)."""
    # As `word`, which is not called: every cycle that is drawn passes here.
    bits = (key + number * _GAMMA) & _WORD
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _WORD
    bits ^= bits >> 31
    radius = sqrt(-2.0 * log(((bits >> 32) + 0.5) * 2.0**-32))
    angle = _ANGLE * (bits & _HALF)
    return radius * cos(angle), radius * sin(angle)


def lognormal(sigma: float, normal: float) -> float:
    """Of a standard normal number: above 0, of mean 1; `sigma` is its logarithm's deviation."""
    return exp(sigma * normal - sigma * sigma / 2.0)


def exponential(key: int, number: int, mean: float) -> float:
    """Above 0, with that mean."""
    return -mean * log(uniform(key, number))
