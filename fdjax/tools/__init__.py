"""What is done with a model beside generating: info, tune, calibrate, score, doctor."""
