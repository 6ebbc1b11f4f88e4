"""Corpora, prepared for fairseq by one command line: ``python -m data_prep CORPUS --destdir DIR``.

One module per corpus (it knows where the text comes from and how it is cut into sentences), `common` for what
they share about downloads and folders, `parallel` for what they share about parallel text. Nothing here trains
or scores a model.
"""
