"""Decides how many seeds to explore for which prompts, with how many steps, while the trainer is busy.

A planner is a pure state machine: `handle(now_s, event) -> actions` (`protocol`). `simple` has the ones that do not
learn, `bandit` those that do; docs/planner.md has the mathematics. Nothing here reads a clock or draws from a global
generator, so the coordinator, a simulation and a test get the same decisions.
"""
