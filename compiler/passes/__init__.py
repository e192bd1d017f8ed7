"""Passes: pure functions Program -> Program, one file each, named by a verb; ``pipeline.py`` lists the order."""
