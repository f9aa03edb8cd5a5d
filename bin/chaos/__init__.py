"""`headrace chaos`: a real farm under real faults, and what must hold of it afterwards.

`faults` (what happens when), `workload` (what is built, and what must come of it) and `verdict`
(what is wrong in the end) decide, and are pure; `farm` and what it is made of (`daemon`, `proxy`,
`disk`, `ledger`) do.
"""
