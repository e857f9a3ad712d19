"""Tools besides generation: info, doctor, tune, calibrate, quantise, score."""
