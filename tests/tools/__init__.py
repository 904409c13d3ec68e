"""Tests of the tools: explain, blame, monitor, compare, expect, forecast, guard."""
