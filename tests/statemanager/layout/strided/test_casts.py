"""Casts between dtypes, bit for bit against torch."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.layout.strided.casts import CAST_RULES, NUMPY_DTYPES, cast

TORCH_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
BITS = {4: (np.uint32, torch.int32), 2: (np.uint16, torch.int16)}
RULES = sorted(CAST_RULES)


def as_torch(source: npt.NDArray[np.generic], rule: tuple[str, str]) -> npt.NDArray[np.generic]:
    """The bits that torch casts the elements to."""
    words = torch.from_numpy(source.view(f"i{source.itemsize}").copy())
    values = words.view(TORCH_DTYPES[rule[0]])
    cast_words = values.to(TORCH_DTYPES[rule[1]])
    unsigned, signed = BITS[NUMPY_DTYPES[rule[1]].itemsize]
    found: npt.NDArray[np.generic] = cast_words.view(signed).numpy().view(unsigned)
    return found


def ours(source: npt.NDArray[np.generic], rule: tuple[str, str]) -> npt.NDArray[np.generic]:
    target = np.empty(source.shape, NUMPY_DTYPES[rule[1]])
    cast(source, target, rule)
    return target.view(BITS[target.itemsize][0])


def is_nan(bits: npt.NDArray[np.generic], dtype: str) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = np.isnan(bits.view(NUMPY_DTYPES[dtype]).astype(np.float32))
    return found


def assert_equal(
    found: npt.NDArray[np.generic], expected: npt.NDArray[np.generic], dtype: str
) -> None:
    """Equal bits. NaNs match any NaN, since torch's own bits depend on the CPU's instructions."""
    nan = is_nan(expected, dtype)
    assert np.array_equal(nan, is_nan(found, dtype))
    assert np.array_equal(found[~nan], expected[~nan])


@pytest.mark.parametrize("rule", RULES)
def test_every_short_value_and_its_neighbours_cast_as_torch_casts_them(
    rule: tuple[str, str],
) -> None:
    halves = np.arange(1 << 16, dtype=np.uint32)
    if NUMPY_DTYPES[rule[0]].itemsize == 2:
        source = halves.astype(np.uint16).view(NUMPY_DTYPES[rule[0]])
    else:
        # All upper halves with the lower halves around a tie.
        lows = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
        source = ((halves[:, None] << 16) | lows).reshape(-1).view(np.float32)
    with np.errstate(invalid="ignore"):
        assert_equal(ours(source[None], rule)[0], as_torch(source, rule), rule[1])


@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=64), st.sampled_from(RULES))
def test_any_bits_cast_as_torch_casts_them(bits: list[int], rule: tuple[str, str]) -> None:
    source = np.array(bits, dtype=np.uint32).view(NUMPY_DTYPES[rule[0]])
    with np.errstate(invalid="ignore"):
        assert_equal(ours(source[None], rule)[0], as_torch(source, rule), rule[1])


@pytest.mark.parametrize("rule", RULES)
def test_blocks_and_strides_change_nothing(rule: tuple[str, str]) -> None:
    random = np.random.default_rng(0)
    wide = random.standard_normal((70, 3000)).astype(NUMPY_DTYPES[rule[0]])
    target = np.zeros((70, 3000), NUMPY_DTYPES[rule[1]])
    cast(wide[::2, 5:2900], target[1::2, 7:2902], rule)
    expected = ours(wide, rule)[::2, 5:2900]
    assert np.array_equal(target.view(expected.dtype)[1::2, 7:2902], expected)
    assert not target.view(expected.dtype)[::2].any()
    long = random.standard_normal((2, 200_000)).astype(NUMPY_DTYPES[rule[0]])
    assert_equal(ours(long, rule), as_torch(long, rule), rule[1])


def test_an_unsupported_cast_is_refused() -> None:
    some = np.zeros((1, 4), np.float32)
    with pytest.raises(InvalidRequestError, match="a cast from F16 to BF16 is not supported"):
        cast(some.astype(np.float16), some, ("F16", "BF16"))
