"""The router's pages for people."""
