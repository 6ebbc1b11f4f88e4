"""Corpora, prepared for fairseq by one command line: ``python -m data_prep CORPUS --destdir DIR``.

One module per corpus (it knows where the text comes from and how it is cut into sentences). What they share: `common`
files of package registries and folders of stages, `downloads` and `archives` files of public addresses, `parallel`
sentence pairs in memory and fairseq-preprocess, `bitext`, `cleaning`, `subwords` and `stages` parallel text of any
size. Nothing here trains or scores a model.
"""
