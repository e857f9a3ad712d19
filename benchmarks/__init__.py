"""The measurements behind every claim: scripts here, records under `results/<device>/`."""
