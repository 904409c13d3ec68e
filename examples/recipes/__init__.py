"""Recipes from papers: one program of at most 40 lines for each, run by the tests."""
