"""The diagnosis of a run that makes no progress. Pure functions, except for reading stacks and process
states.
"""
