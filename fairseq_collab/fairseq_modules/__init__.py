"""The attention behind fairseq's interfaces: modules, layers, encoder, decoder. Registers nothing."""
