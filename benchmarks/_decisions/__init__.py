"""The streams that ``benchmarks/decisions.py`` replays, one module a section."""
