"""Tests: unit/ needs no privilege, kernel/ loads BPF and probes real processes."""
