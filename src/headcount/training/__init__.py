"""How it learns: a recipe, batches that never leave the device, one loop, and MPEM."""
