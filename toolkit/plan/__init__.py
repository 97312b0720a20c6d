"""Deciding: a run description and a world in, a frozen plan out. Pure; no torch, no engine."""
