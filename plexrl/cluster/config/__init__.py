"""Options of a cluster, and the file that holds every setting of every part."""

from plexrl.cluster.config.options import ClusterOptions

__all__ = ["ClusterOptions"]
