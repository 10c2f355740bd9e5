"""Environments of other libraries with `reset` and `step`: Gymnasium, OpenEnv.

Both are used through the object that the library makes, so neither is imported here.
"""

from collections.abc import Callable, Sequence
from typing import Any

from plexrl.environments.environment import Observation, Step


class GymEnvironment:
    """An environment with Gymnasium's `reset` and `step` (`pip install 'plexrl[gymnasium]'`)."""

    def __init__(
        self,
        environment: Any,
        *,
        act: Callable[[str], Any] = str.strip,
        describe: Callable[[Any], Observation] = str,
        seed: int | None = None,
        stops: Sequence[str] = (),
    ) -> None:
        """`environment` is a `gymnasium.Env`, or has the same methods. `act` reads an action in a
        reply; if it raises `ValueError`, the reply is no action, and the trajectory ends without a
        further reward. `describe` writes an observation. `seed` is that of `reset`. A reply ends
        at any of `stops`."""
        self._environment, self._act, self._describe = environment, act, describe
        self._seed = seed
        self.stops: Sequence[str] = tuple(stops)

    def reset(self) -> Observation:
        """As `Environment.reset`."""
        observation, _ = self._environment.reset(seed=self._seed)
        return self._describe(observation)

    def step(self, reply: str) -> Step:
        """As `Environment.step`. A truncated episode is over, too."""
        try:
            action = self._act(reply)
        except ValueError:
            return Step(done=True)
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        return Step(
            observation=self._describe(observation),
            reward=float(reward),
            done=bool(terminated or truncated),
        )


class OpenEnvEnvironment:
    """An environment behind OpenEnv's HTTP server (`pip install 'plexrl[openenv]'`)."""

    def __init__(
        self,
        client: Any,
        *,
        act: Callable[[str], Any],
        describe: Callable[[Any], Observation] = str,
        stops: Sequence[str] = (),
    ) -> None:
        """`client` is a blocking client of the server, one for each trajectory:
        `GenericEnvClient(base_url=…).sync()` of `openenv.core.generic_client`, or that of the
        environment's own package. It is connected at the start, and closed when the server
        says that it is done. After a trajectory that ended otherwise, such as by `turns_max`, call
        `close`. `act` reads an action in a reply; if it raises `ValueError`, the trajectory ends
        without a further reward. `describe` writes an observation. A reply ends at any of
        `stops`."""
        self._client, self._act, self._describe = client, act, describe
        self.stops: Sequence[str] = tuple(stops)

    def reset(self) -> Observation:
        """As `Environment.reset`."""
        self._client.connect()
        return self._describe(self._client.reset().observation)

    def step(self, reply: str) -> Step:
        """As `Environment.step`."""
        try:
            action = self._act(reply)
        except ValueError:
            self._client.close()
            return Step(done=True)
        result = self._client.step(action)
        if result.done:
            self._client.close()
        return Step(
            observation=self._describe(result.observation),
            reward=float(result.reward or 0.0),
            done=bool(result.done),
        )

    def close(self) -> None:
        """End the session at the server, if there is one."""
        self._client.close()
