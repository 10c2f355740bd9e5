"""Which deployments share a prior."""

from dataclasses import replace

from plexrl.ids import DeploymentId
from plexrl.scheduler.accounting.earlier_jobs import shape_key
from tests.scheduler.fake_cluster import FakeCluster


def test_a_critic_has_another_prior_than_a_policy_of_its_size() -> None:
    cluster = FakeCluster()
    cluster.start_node(4)
    cluster.job("a")
    cluster.deploy("a/actor")
    actor = cluster.core.cluster.state.deployments[DeploymentId("a/actor")]

    def key(text: str) -> str:
        return shape_key(replace(actor, spec=replace(actor.spec, spec_json=text)))

    causal = key('{"model": {"head": "causal"}, "workers": 1}')
    assert causal == key('{"model": {"path": "/another"}, "workers": 1}')
    assert causal != key('{"model": {"head": "value"}, "workers": 1}')
