"""The SDK for `async` controllers."""
