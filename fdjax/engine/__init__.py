"""Running a model: programs, state, cache, schedule, results."""
