"""Casts on the way, bit for bit against torch."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.layout.casts import F8_MAX, NUMPY_DTYPES, amax_of, cast, scale_of
from plexrl.statemanager.layout.plan.plan import CAST_RULES

TORCH_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
BITS = {4: (np.uint32, torch.int32), 2: (np.uint16, torch.int16), 1: (np.uint8, torch.uint8)}
RULES = sorted(CAST_RULES)
TORCH_SATURATES = bool(torch.tensor(1e4).to(torch.float8_e4m3fn).float().isfinite())
"""Whether what is too large for F8_E4M3 becomes its largest value, as it does not in torch 2.11."""


def as_torch(source: npt.NDArray[np.generic], rule: tuple[str, str]) -> npt.NDArray[np.generic]:
    """What torch makes of it, as bits."""
    words = torch.from_numpy(source.view(f"i{source.itemsize}").copy())
    values = words.view(TORCH_DTYPES[rule[0]])
    if rule[1] == "F8_E4M3" and not TORCH_SATURATES:
        values = values.clamp(-F8_MAX[rule[1]], F8_MAX[rule[1]])
    cast_words = values.to(TORCH_DTYPES[rule[1]])
    unsigned, signed = BITS[NUMPY_DTYPES[rule[1]].itemsize]
    found: npt.NDArray[np.generic] = cast_words.view(signed).numpy().view(unsigned)
    return found


def ours(
    source: npt.NDArray[np.generic], rule: tuple[str, str], scale: float = 1.0
) -> npt.NDArray[np.generic]:
    target = np.empty(source.shape, NUMPY_DTYPES[rule[1]])
    cast(source, target, rule, scale)
    return target.view(BITS[target.itemsize][0])


def is_nan(bits: npt.NDArray[np.generic], dtype: str) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = np.isnan(bits.view(NUMPY_DTYPES[dtype]).astype(np.float32))
    return found


def assert_equal(
    found: npt.NDArray[np.generic], expected: npt.NDArray[np.generic], dtype: str
) -> None:
    """Equal bits; of NaN torch's own bits differ with the instructions it happens to use."""
    nan = is_nan(expected, dtype)
    assert np.array_equal(nan, is_nan(found, dtype))
    assert np.array_equal(found[~nan], expected[~nan])


@pytest.mark.parametrize("rule", RULES)
def test_every_short_value_and_its_neighbours_cast_as_torch_casts_them(
    rule: tuple[str, str],
) -> None:
    halves = np.arange(1 << 16, dtype=np.uint32)
    if rule[0] == "BF16":
        source = halves.astype(np.uint16).view(NUMPY_DTYPES["BF16"])
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


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2"])
def test_a_scaled_tensor_fills_the_format_and_saturates(dtype: str) -> None:
    source = np.random.default_rng(1).standard_normal((40, 1000)).astype(np.float32) * 1e4
    scale = scale_of(amax_of(source), dtype)
    found = ours(source, ("F32", dtype), scale).view(NUMPY_DTYPES[dtype]).astype(np.float32)
    assert np.abs(found).max() == F8_MAX[dtype]
    steps = 2.0 ** (-3 if dtype == "F8_E4M3" else -2) / 2
    # Half a step of the mantissa, or of the smallest normal number.
    bound = np.abs(source) * steps + scale * 2.0**-6
    assert (np.abs(found * scale - source) <= bound).all()
    doubled = ours(source * 2, ("F32", dtype), scale).view(NUMPY_DTYPES[dtype]).astype(np.float32)
    assert np.isfinite(doubled).all()


def test_scales_of_nothing_and_of_what_is_not_finite_leave_values_alone() -> None:
    assert amax_of(np.zeros(0, np.float32)) == 0.0
    assert scale_of(0.0, "F8_E4M3") == scale_of(float("inf"), "F8_E4M3") == 1.0
    assert amax_of(np.array([1, -7, 3], np.float32).astype(NUMPY_DTYPES["BF16"])) == 7.0


def test_what_no_rule_casts_is_refused() -> None:
    some = np.zeros((1, 4), np.float32)
    with pytest.raises(InvalidRequestError, match="no rule casts F16 to F32"):
        cast(some.astype(np.float16), some, ("F16", "F32"))
    with pytest.raises(InvalidRequestError, match="only F8 formats are scaled"):
        cast(some, some.astype(np.float16), ("F32", "F16"), 2.0)
