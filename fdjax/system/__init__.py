"""What fdjax needs of the machine: files, signals, the platform JAX runs on."""
