"""What a checkpoint's files hold. Pure."""
