"""The router: HTTP in front, admitted operations behind."""
