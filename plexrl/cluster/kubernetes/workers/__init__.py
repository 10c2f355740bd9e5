"""Workers as pods of their own, started by the agent in the node's pod."""
