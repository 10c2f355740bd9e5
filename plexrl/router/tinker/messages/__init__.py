"""Bodies of requests and answers, and what they mean to PlexRL."""
