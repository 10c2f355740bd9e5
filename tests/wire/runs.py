"""Makes runs for tests, of any kind, from the fields that matter there."""

from typing import Any

from plexrl.wire.messages import RUNS
from plexrl.wire.operations import OperationKind

USUAL: dict[str, Any] = {
    "operation": "o",
    "deployment": "j/actor",
    "job": "j",
    "group": "g",
    "token": 1,
    "seq": 1,
    "addresses": (),
    "incarnation": 1,
    "replay": False,
    "keep_seq": 0,
    "previous_seq": 0,
    "params": None,
    "payload": None,
    "partial": None,
    "source": "a",
    "source_seq": 0,
    "sources": (),
    "trainer_step": 0,
}


def make_run(kind: OperationKind, **fields: Any) -> Any:
    """A run of this kind; fields that are not given have the usual values."""
    made: Any = next(each for each in RUNS if each.kind is kind)
    usual = {name: value for name, value in USUAL.items() if name in made.__struct_fields__}
    return made(**{**usual, **fields})


def move_of(kind: OperationKind, seq: int) -> Any:
    """A load, offload or snapshot of a version; a save keeps this version only."""
    kept = {} if kind in (OperationKind.LOAD, OperationKind.PUBLISH) else {"keep_seq": seq}
    return make_run(kind, seq=seq, **kept)
