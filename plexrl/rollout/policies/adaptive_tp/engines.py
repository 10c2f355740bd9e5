"""Which engines of a round switch their tensor-parallel groups (PAT §4.2).

An engine is looked at only while its rows just end: nothing of the round waits for an instance or
is still to come, all that the engine has is running, and it has answered its last switch. In the
first round nothing is known of lengths, and none switches.
"""

from collections.abc import Iterable, Mapping

from plexrl.rollout.instances.expected_instance import ExpectedInstance
from plexrl.rollout.instances.snapshot import InstanceSnapshot
from plexrl.rollout.policies.adaptive_tp.controller import SwitchController, TpSwitch
from plexrl.rollout.policies.adaptive_tp.predictor import LatencyPredictor
from plexrl.rollout.policies.adaptive_tp.projection import DecodingRow, project
from plexrl.rollout.policies.adaptive_tp.settings import AdaptiveTpSettings
from plexrl.rollout.policies.tail_batching.rounds import Rounds
from plexrl.rollout.trajectories.record import InstanceId
from plexrl.rollout.trajectories.server import TrajectoryServer


class AdaptiveTp:
    """The controller of all instances of a rollout."""

    def __init__(self, settings: AdaptiveTpSettings | None) -> None:
        """Without `settings` no engine switches."""
        self._settings = settings
        self._controller = (
            None if settings is None else SwitchController(LatencyPredictor(settings.profile))
        )

    def switches(
        self,
        server: TrajectoryServer,
        rounds: Rounds,
        snapshots: Iterable[InstanceSnapshot],
        expected: Mapping[InstanceId, ExpectedInstance],
    ) -> dict[InstanceId, TpSwitch]:
        """The switches that pay now. The snapshots show the effect of all commands, but maybe not
        of switches."""
        if self._settings is None or server.waiting or rounds.progress(server) is None:
            return {}
        found = {}
        for snapshot in snapshots:
            instance = expected[snapshot.instance]
            if snapshot.waiting or not snapshot.serves or instance.coming or instance.is_switching:
                continue
            if (switch := self._decide(self._settings, server, snapshot)) is not None:
                found[snapshot.instance] = switch
        return found

    def _decide(
        self, settings: AdaptiveTpSettings, server: TrajectoryServer, snapshot: InstanceSnapshot
    ) -> TpSwitch | None:
        sizes = settings.profile.subject.tp_sizes
        if self._controller is None or snapshot.tp not in sizes or not server.lengths.recent:
            return None
        groups: list[list[DecodingRow]] = [[] for _ in range(sizes[-1] // snapshot.tp)]
        running = zip(snapshot.running, snapshot.running_tokens, strict=True)
        places = snapshot.groups or (0,) * len(snapshot.running)
        for (each, tokens), group in zip(running, places, strict=True):
            record = server.get(each)
            assert record is not None, "a snapshot that is used shows what is held"
            # One that has just begun shows no token yet.
            drawn = max(0, tokens - record.prompt_tokens)
            groups[group].append(
                DecodingRow(record.prompt_tokens + drawn, drawn, settings.response_tokens_max)
            )
        projected = project(groups, server.lengths.recent)
        # A round begins with the smallest groups.
        return self._controller.decide(snapshot.tp, projected, first_tp=sizes[0])
