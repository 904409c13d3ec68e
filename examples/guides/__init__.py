"""Guides: for each framework one program of at most 60 lines, run by the tests."""
