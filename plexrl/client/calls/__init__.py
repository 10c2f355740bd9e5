"""The SDK's requests to a router, and the controller's connection to its job."""
