"""Puts this folder on the path of every test below it: ``reference`` and ``rig`` are imported by name."""
