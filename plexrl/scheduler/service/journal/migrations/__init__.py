"""The journal's schema, one revision a file in `versions`; run by
`plexrl.scheduler.service.journal.schema`."""
