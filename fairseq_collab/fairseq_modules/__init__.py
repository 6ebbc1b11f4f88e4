"""The attention behind fairseq's interfaces: modules, layers, encoder and decoder. Imports fairseq; registers nothing."""
