"""The same classes as real torch Functions and as ports, compared number by number."""
