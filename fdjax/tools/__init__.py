"""Tools beside generation: info, doctor, tune, calibrate, score."""
