"""Draws requests from ServeGen's published distributions of lengths and rates, per client.

`chunk-N-dataset.json` has, for each time window by its first second, a distribution
`{tokens: probability}` of each length, as text. `chunk-N-trace.csv` (without a header) has the
client's request rate in each ten minutes. ServeGen publishes no single requests, so they are drawn:
client and time by the rates, each length from its own distribution. Correlations within a request
are not published and not modelled.
"""

import csv
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from plexrl.errors import InvalidRequestError, TraceError
from plexrl.traces.schema import ResponseLength

REQUESTS = 10_000
"""Default number of drawn requests."""
REQUESTS_MAX = 10_000_000
"""Most drawn requests; each takes 32 bytes of memory until it is written."""
FILE_BYTES_MAX = 1 << 28

OUTPUT = "output_tokens"
PROMPTS = ("input_tokens", "text_tokens", "image_tokens", "audio_tokens", "video_tokens")
"""Fields whose sum is a prompt's length; clients of text models have the first only."""

_NAME = re.compile(r"chunk-(?P<client>\d+)-dataset\.json")
_STRETCH_S = 600.0
"""Length of the interval of each line of a client's rates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Number of requests to draw, and the seed."""

    requests: int = REQUESTS
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.requests <= REQUESTS_MAX:
            raise InvalidRequestError(f"draw 1 to {REQUESTS_MAX:,} requests, not {self.requests:,}")


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Requests of one client in one interval of its rates."""

    client: int
    """Index of its file."""
    start_s: float
    length_s: float
    expected: float
    window: str
    """Window of its distributions."""


def client_files(path: Path) -> list[Path]:
    """The clients' files of a folder, or the file itself; empty if `path` is neither."""
    if path.is_dir():
        found = [each for each in path.iterdir() if _NAME.fullmatch(each.name)]
        return sorted(found, key=lambda each: int(_client(each)))
    return [path] if is_client_file(path) else []


def is_client_file(path: Path) -> bool:
    """Whether the file is a JSON object that begins with a window of distributions."""
    try:
        with path.open("rb") as file:
            first = file.read(256)
    except OSError:
        return False
    return bool(re.match(rb'\s*\{\s*"\d+"\s*:\s*\{\s*"[a-z_]+"\s*:\s*"\{', first))


def draw_requests(files: list[Path], draw: Draw) -> Iterator[ResponseLength]:
    """Requests in order of arrival; without rate files they have no arrival times.

    Raises:
        TraceError: a file is invalid; the message says where.
    """
    rng = np.random.default_rng(draw.seed)
    stretches = [stretch for index, file in enumerate(files) for stretch in _stretches(index, file)]
    weights = np.array([stretch.expected for stretch in stretches])
    if not weights.sum() > 0:
        raise TraceError(f"{files[0].parent}: no client has both a rate and lengths at any time")
    counts = rng.multinomial(draw.requests, weights / weights.sum())
    has_times = all(_rates_file(file).is_file() for file in files)
    clients, arrivals = np.empty(draw.requests, np.int64), np.empty(draw.requests)
    lengths = np.empty((2, draw.requests), np.int64)
    at = 0
    for index, file in enumerate(files):
        mine = [
            (s, n) for s, n in zip(stretches, counts.tolist(), strict=True) if s.client == index
        ]
        if not any(count for _, count in mine):
            continue
        windows = _windows(file)
        for stretch, count in mine:
            part = slice(at, at + count)
            at += count
            clients[part] = index
            arrivals[part] = stretch.start_s + rng.random(count) * stretch.length_s
            found = {name: _sample(each, count, rng) for name, each in windows[stretch.window]}
            lengths[0, part] = sum(found[name] for name in PROMPTS if name in found)
            lengths[1, part] = found[OUTPUT]
    for row in np.argsort(arrivals, kind="stable").tolist() if has_times else range(draw.requests):
        yield ResponseLength(
            output_tokens=int(lengths[1, row]),
            prompt_tokens=int(lengths[0, row]),
            arrival_s=round(float(arrivals[row]), 3) if has_times else None,
            source=_client(files[clients[row]]),
        )


_Counts = npt.NDArray[np.int64]
_Distribution = tuple[_Counts, npt.NDArray[np.float64]]
"""Token counts and cumulative probabilities."""


def _sample(distribution: _Distribution, count: int, rng: np.random.Generator) -> _Counts:
    tokens, below = distribution
    indices = np.searchsorted(below, rng.random(count) * below[-1], side="right")
    drawn: _Counts = tokens[np.minimum(indices, len(tokens) - 1)]
    return drawn


def _stretches(index: int, file: Path) -> list[_Stretch]:
    """The intervals in which the client sent requests of known lengths. An interval uses the last
    window with distributions that began before it."""
    known = sorted(int(start) for start in _windows(file))
    rates = _rates(_rates_file(file))
    if rates is None:
        return [_Stretch(index, float(start), 0.0, 1.0, str(start)) for start in known]
    found = []
    for place, (start_s, rate) in enumerate(rates):
        length_s = rates[place + 1][0] - start_s if place + 1 < len(rates) else _STRETCH_S
        before = [start for start in known if start <= start_s]
        if rate > 0 and before:
            found.append(_Stretch(index, start_s, length_s, rate * length_s, str(before[-1])))
    return found


def _windows(file: Path) -> dict[str, list[tuple[str, _Distribution]]]:
    """Distributions by first second of the window, without windows in which nothing was sent."""
    if file.stat().st_size > FILE_BYTES_MAX:
        raise TraceError(f"{file} is larger than 256 MiB: it is not a client of ServeGen's")
    try:
        given = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{file} is not JSON: {error}", path=str(file)) from error
    if not isinstance(given, dict) or not all(_is_window(*each) for each in given.items()):
        raise TraceError(
            f'{file} is not a client of ServeGen: it should be {{"SECOND": {{"{OUTPUT}": '
            '"{TOKENS: PROBABILITY, …}", …}, …}',
            path=str(file),
        )
    return {
        start: [
            (name, _distribution(file, f"{start}.{name}", text))
            for name, text in fields.items()
            if name in (*PROMPTS, OUTPUT)
        ]
        for start, fields in given.items()
        if fields[OUTPUT].strip(" {}")
    }


def _is_window(start: str, fields: object) -> bool:
    return (
        start.isdecimal()
        and isinstance(fields, dict)
        and OUTPUT in fields
        and all(isinstance(field, str) for field in fields.values())
    )


def _distribution(file: Path, field: str, text: str) -> _Distribution:
    try:
        pairs = [each.split(":") for each in text.strip(" {}").split(",")]
        tokens = np.array([int(count) for count, _ in pairs], np.int64)
        parts = np.array([float(part) for _, part in pairs])
    except (ValueError, OverflowError) as error:
        raise TraceError(
            f"{file}: {field} is not a distribution {{TOKENS: PROBABILITY, …}}: {text[:60]!a}",
            path=str(file),
        ) from error
    if (tokens < 0).any() or not (parts >= 0).all() or not 0 < parts.sum() < math.inf:
        raise TraceError(
            f"{file}: {field} has tokens or probabilities below 0, or sums to nothing: "
            f"{text[:60]!a}",
            path=str(file),
        )
    return tokens, np.cumsum(parts)


def _rates(file: Path) -> list[tuple[float, float]] | None:
    """(first second, requests per second) of each interval; None without a file."""
    if not file.is_file():
        return None
    found: list[tuple[float, float]] = []
    with file.open(encoding="utf-8", newline="") as lines:
        for line, row in enumerate(csv.reader(lines), 1):
            try:
                start_s, rate = float(row[0]), float(row[1])
                if not (0 <= rate < math.inf and (not found or start_s > found[-1][0])):
                    raise ValueError
            except (ValueError, IndexError) as error:
                raise TraceError(
                    f"{file}: line {line}: the first two cells are no second, later than the line "
                    f"before, and rate of at least 0: {','.join(row)[:60]!a}",
                    path=str(file),
                ) from error
            found.append((start_s, rate))
    return found


def _rates_file(file: Path) -> Path:
    return file.with_name(f"chunk-{_client(file)}-trace.csv")


def _client(file: Path) -> str:
    match = _NAME.fullmatch(file.name)
    return match["client"] if match else file.stem
