"""Benchmarks that can be trusted: device time, cold L2, measured ceiling, checked results, records.

`suite.run_cases` measures `Case`s into a `Record`, `suite.main` makes a script of them,
`compare.compare` holds two records against each other, `timing.wall` times whole programs.
"""
