"""Counter-based random numbers: the n-th number of a stream depends on its key and n alone. Pure.

Two runs that differ in policy therefore draw equal values for the same thing in any order, and a
stream needs no memory. The generator is splitmix64 (Steele, Lea and Flood, OOPSLA 2014), which
allows random access.
"""

from hashlib import blake2b
from math import cos, exp, log, pi, sin, sqrt

_WORD = (1 << 64) - 1
_HALF = (1 << 32) - 1
_GAMMA = 0x9E3779B97F4A7C15
_ANGLE = 2.0 * pi * 2.0**-32


def stream(seed: int, *names: str) -> int:
    """The key of a stream; another name or another seed gives another stream."""
    text = "\0".join((str(seed), *names))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def word(key: int, number: int) -> int:
    """The `number`-th 64 random bits of the stream."""
    bits = (key + number * _GAMMA) & _WORD
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _WORD
    return bits ^ (bits >> 31)


def uniform(key: int, number: int) -> float:
    """A uniform number in the open interval (0, 1)."""
    return ((word(key, number) >> 11) + 0.5) * 2.0**-53


def normals(key: int, number: int) -> tuple[float, float]:
    """Two independent standard normal numbers, of at most 6.8 standard deviations (Box-Muller)."""
    # A copy of `word`, for speed: every drawn cycle calls this function.
    bits = (key + number * _GAMMA) & _WORD
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _WORD
    bits ^= bits >> 31
    radius = sqrt(-2.0 * log(((bits >> 32) + 0.5) * 2.0**-32))
    angle = _ANGLE * (bits & _HALF)
    return radius * cos(angle), radius * sin(angle)


def lognormal(sigma: float, normal: float) -> float:
    """A lognormal number of mean 1 from a standard normal one; `sigma` is of its logarithm."""
    return exp(sigma * normal - sigma * sigma / 2.0)


def exponential(key: int, number: int, mean: float) -> float:
    """An exponential number with this mean."""
    return -mean * log(uniform(key, number))
