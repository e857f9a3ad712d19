"""Benchmarks that can be trusted: device time, cold L2, measured ceiling, checked results, records.

`suite.run_cases` measures `Case`s into a `Record`, and `suite.main` runs them as a script.
`compare.compare` compares two records. `timing.wall` times whole programs.
"""
