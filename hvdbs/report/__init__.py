"""Runs and benchmark tables as one HTML page, pictures and a few tables of text (``python -m hvdbs.report``).

``runs`` and ``benchmarks`` read, ``comparison`` and ``stages`` say what it comes to, ``figures`` and ``charts`` draw,
``views``, ``tables`` and ``page`` put it together.
"""
