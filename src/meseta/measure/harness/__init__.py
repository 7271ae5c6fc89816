"""Benchmark harness: interleaved timing of several implementations, each in separate processes."""
