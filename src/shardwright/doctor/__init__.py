"""Checks of a cluster before a long run, and measured rates for the planner.

Each module measures one subject on one rank (`read_...`, `time_...`) and judges the results of
all ranks (`judge_...`). Judging needs neither torch nor peers, so tests use recorded numbers.
`examination_stages` runs the stages of one rank in order; `diagnosis` starts the ranks and joins
their reports.
"""
