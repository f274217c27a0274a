"""``python -m hvdbs.doctor``: what works here and what does not, with the fix in a line each.

It has to answer where nothing is installed: standard library alone at import, torch and Horovod in a process of their
own (``probe``). ``findings`` says what a line is.
"""
