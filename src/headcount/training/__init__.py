"""How a model learns: configuration, batches, one loop, MPEM and EM."""
