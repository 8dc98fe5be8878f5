"""The snippets are read by type checkers, and not collected."""

collect_ignore = ["snippets"]
