"""What watching costs: developer benches, for `make bench`. They write to standard output only."""
