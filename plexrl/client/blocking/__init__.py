"""The SDK for blocking controllers."""
