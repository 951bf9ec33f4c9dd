"""Is this cluster fit for a long run? Versions, devices, hosts, rates, links and peers, each judged; and rates for the planner.

Every module measures one thing on one rank (`read_...`, `time_...`) and judges what all ranks have found (`judge_...`); judging
needs no torch and no peers, so it is tested on recorded numbers. `examination` is what one rank does, in order; `doctor` starts
the ranks and puts their reports together.
"""
