"""The machine below fdjax: files, signals, memory, and the platform that JAX runs on."""
